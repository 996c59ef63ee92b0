"""The committed base model: plain transformers loads it, and a small sample of its two figures holds."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from lorikeet.demo.data import corpus
from lorikeet.demo.evaluation import base as evaluate
from lorikeet.demo.training.model import BASE_FOLDER, base_config

MAX_COMMITTED_BYTES = 20_000_000
SAMPLE_BYTES = 60_000
NUM_SAMPLED_CONTINUATIONS = 32


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(BASE_FOLDER)


def test_it_is_a_llama_of_the_promised_size(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    assert isinstance(model, LlamaForCausalLM)
    assert 5_000_000 <= model.num_parameters() <= 8_000_000
    shape = ("hidden_size", "num_hidden_layers", "num_key_value_heads", "max_position_embeddings", "vocab_size")
    assert all(getattr(model.config, name) == getattr(base_config(), name) for name in shape)
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == [1, 6]


def test_the_files_are_bf16_and_small() -> None:
    with safe_open(BASE_FOLDER / "model.safetensors", framework="pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert sum(path.stat().st_size for path in BASE_FOLDER.iterdir()) < MAX_COMMITTED_BYTES


@pytest.mark.long
def test_held_out_source_needs_fewer_bits_than_xz(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """A sample of the files against xz over all of them, where xz is at its best."""
    files = corpus.held_out_files()
    sample = []
    for file in sorted(files, key=lambda f: f.path[::-1]):
        if sum(len(f.text) for f in [*sample, file]) <= SAMPLE_BYTES:
            sample.append(file)
    assert evaluate.bits_per_byte(model, tokenizer, sample) < evaluate.xz_bits_per_byte(files)


@pytest.mark.long
def test_most_continuations_compile(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    functions = evaluate.held_out_functions(corpus.held_out_files(), NUM_SAMPLED_CONTINUATIONS)
    prompts = [evaluate.prompt_of(function) for function in functions]
    written = evaluate.continuations(model, tokenizer, prompts)
    assert sum(continuation.counts for continuation in written) >= 0.5 * len(prompts)  # room for 32 being few


def test_the_bits_of_a_file_do_not_depend_on_the_windows(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the whole past in every window the sum is the one a single forward gives."""
    text = corpus.held_out_files()[0].text[:1500]
    ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
    with torch.inference_mode():
        logits = model(ids[:, :-1]).logits[0].float()
    nats = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    expected = nats / math.log(2) / len(text.encode())
    monkeypatch.setattr(evaluate, "WINDOW_STEP", ids.shape[1])
    monkeypatch.setattr(evaluate, "WINDOW_LEN", 100 + ids.shape[1])
    assert evaluate.bits_per_byte(model, tokenizer, [corpus.SourceFile("a.py", text)]) == pytest.approx(expected)
    monkeypatch.setattr(evaluate, "WINDOW_STEP", 150)
    monkeypatch.setattr(evaluate, "WINDOW_LEN", 250)
    windowed = evaluate.bits_per_byte(model, tokenizer, [corpus.SourceFile("a.py", text)])
    assert windowed == pytest.approx(expected, rel=0.25)
    assert windowed != expected


@pytest.mark.parametrize(
    ("text", "stopped", "kept", "ended"),
    [
        ("\n    return 1\n\ndef g():\n", False, "\n    return 1\n\n", True),
        ("\n    return 1", True, "\n    return 1", True),
        ("\n    a = 1\n    b = [1,\n         2", False, "\n    a = 1\n    b = [1,\n", False),
        (" and so", False, "", False),
    ],
)
def test_the_cut_of_a_continuation(text: str, stopped: bool, kept: str, ended: bool) -> None:
    assert evaluate.cut(text, stopped) == (kept, ended)


def test_a_prompt_ends_where_the_body_begins() -> None:
    source = 'def add(a, b):\n    """Add."""\n    return a + b\n'
    function = corpus.CorpusFunction("a.py", "add", source, "Add.", 2)
    assert evaluate.prompt_of(function) == 'def add(a, b):\n    """Add."""\n    '


@pytest.mark.parametrize(
    ("text", "ended", "counts"),
    [
        ("\n    return 1\n", True, True),
        ("\n    a = 1\n    b = 2\n    c = 3\n", False, True),
        ("\n    a = 1\n    b = 2\n", False, False),
        ("\n    a = 1\n    b = 2\n    c = (\n", False, False),
        ("\n    a = 1\n    b = 2\n    try:\n", False, False),
        ("\n\n\n\n\n", False, False),
        ("", True, False),
    ],
)
def test_what_counts_as_compiling(text: str, ended: bool, counts: bool) -> None:
    assert evaluate.Continuation('def f():\n    """Say."""', text, ended).counts is counts


def readme_report() -> tuple[str, evaluate.BaseReport]:
    readme = (Path(evaluate.__file__).parents[1] / "README.md").read_text()
    found = re.search(r"^\{.*\}$", readme, re.MULTILINE)
    assert found
    return readme, evaluate.BaseReport(**json.loads(found.group()))


def test_the_readme_quotes_what_the_script_prints() -> None:
    readme, report = readme_report()
    assert f"| {report.model_bits_per_byte} | {report.xz_bits_per_byte} |" in readme
    assert f"| {report.compiled} of {report.continuations} |" in readme


def test_the_whole_measurement_beat_xz() -> None:
    _, report = readme_report()
    assert report.model_bits_per_byte < report.xz_bits_per_byte


def test_the_whole_measurement_reached_the_share_that_compiles() -> None:
    _, report = readme_report()
    assert report.compiled >= 0.6 * report.continuations
