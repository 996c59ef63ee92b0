"""Hidden rows and their logits equal the model's own, for every supported transform after the output head."""

import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lorikeet.adapters.errors import HeadsError
from tests.adapters.medusa import small

CASES = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 3.0},
    "granite": {},
    "cohere": {"logit_scale": 0.25},
    "gpt2": {},
    "opt": {},
}


@pytest.mark.parametrize("case", CASES)
def test_rows_through_the_output_head_give_the_models_logits(tmp_path: Path, case: str) -> None:
    folder = small.base(tmp_path / "base", case.split(maxsplit=1)[0], **CASES[case])
    target = small.target(folder)
    texts = [[5, 9, 200, 31, 8, 77], [3], [300, 4, 9]]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for text, rows in zip(texts, target.rows(texts), strict=True):
        assert rows.shape == (len(text), target.hidden_size)
        with torch.inference_mode():
            expected = model(torch.tensor([text])).logits[0]
        torch.testing.assert_close(target.logits(rows), expected, rtol=1e-4, atol=1e-4)


def test_an_unsupported_transform_of_the_logits_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small.base(tmp_path / "base", "gemma2", final_logit_softcapping=3.0)
    monkeypatch.setattr("lorikeet.adapters.medusa.target.transforms", lambda config: iter([lambda logits: logits]))
    with pytest.raises(HeadsError, match="transforms its logits after the output head"):
        small.target(folder)


@pytest.mark.parametrize("targets", [("q_proj", "down_proj"), ("lm_head", "v_proj"), ("embed_tokens", "v_proj")])
@pytest.mark.parametrize("tied", [False, True])
def test_the_adapters_target_is_what_peft_computes(tmp_path: Path, targets: tuple[str, ...], tied: bool) -> None:
    from peft import PeftModel

    folder = small.base(tmp_path / "base", tie_word_embeddings=tied)
    adapter = small.lora(folder, tmp_path / "adapter", targets)
    target = small.target(folder, adapter)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = [5, 9, 200, 31, 8, 77]
    (rows,) = target.rows([text])
    with torch.inference_mode():
        bare = model.eval()(torch.tensor([text])).logits[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = PeftModel.from_pretrained(model, str(adapter)).eval()
        expected = model(torch.tensor([text])).logits[0]
    torch.testing.assert_close(target.logits(rows), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected, bare, rtol=1e-2, atol=1e-2)


def test_a_batch_writes_what_each_prompt_gets_alone_and_stops_after_the_end(tmp_path: Path) -> None:
    folder = small.base(tmp_path / "base")
    target = small.target(folder)
    prompts = [list(target.tokenizer(prompt)["input_ids"]) for prompt in small.PROMPTS]
    together = target.write(prompts, 10)
    assert together == [target.write([prompt], 10)[0] for prompt in prompts]
    end = together[0][4]
    target.model.generation_config.eos_token_id = end
    first = together[0].index(end)
    assert target.write(prompts, 10)[0] == together[0][: first + 1]


def test_greedy_text_ignores_the_checkpoints_sampling_settings(tmp_path: Path) -> None:
    folder = small.base(tmp_path / "base")
    target = small.target(folder)
    prompt = list(target.tokenizer("the lazy dog")["input_ids"])
    expected = target.write([prompt], 8)
    config = target.model.generation_config
    config.do_sample, config.temperature, config.repetition_penalty = True, 5.0, 3.0
    assert target.write([prompt], 8) == expected


def test_an_adapter_that_does_not_fit_is_rejected(tmp_path: Path) -> None:
    folder = small.base(tmp_path / "base")
    adapter = small.lora(folder, tmp_path / "adapter")
    other = small.base(tmp_path / "other", hidden_size=32)
    with pytest.raises(HeadsError, match=r"adapter .* does not fit the base"):
        small.target(other, adapter)
    gpt = small.base(tmp_path / "gpt", "gpt2")
    with pytest.raises(HeadsError, match=r"adapter .* does not fit the base"):
        small.target(gpt, adapter)
    fewer = small.base(tmp_path / "fewer", num_hidden_layers=2)
    deeper = small.base(tmp_path / "deeper", num_hidden_layers=4)
    with pytest.raises(HeadsError, match=r"adapter .* does not fit the base"):
        small.target(deeper, adapter)
    with pytest.raises(HeadsError, match=r"adapter .* does not fit the base"):
        small.target(fewer, adapter)
    with pytest.raises(HeadsError, match="is not a model"):
        small.target(adapter)
    (folder / "model.safetensors").unlink()
    with pytest.raises(HeadsError, match="has no safetensors"):
        small.target(folder)
