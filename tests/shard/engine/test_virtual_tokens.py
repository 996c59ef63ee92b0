"""Adapters that put virtual tokens before the prompt give what PEFT gives, in one batch with others and with drafts."""

import warnings
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from lorikeet.proto.params import (
    FIRST_VIRTUAL_ID,
    NO_SPECULATION,
    LogprobParams,
    Method,
    SamplingParams,
    Speculation,
)
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.grpc.streams import Output
from lorikeet.shard.requests.request import Request
from tests import tiny
from tests.adapters import kinds, making
from tests.shard.engine.adapter_exactness import (
    Text,
    Tried,
    compare,
    lay_out,
    load_plain,
    not_of_base,
    oracle,
    outputs_of,
)
from tests.shard.engine.exactness import NEW_TOKENS, prompts_of

COUNTS = {"PROMPT_TUNING": 20, "P_TUNING": 7, "CPT": 4, "PREFIX_TUNING": 9, "CARTRIDGE": 35}
ARCHITECTURES = ["llama", "gpt2", "gemma2"]


class World:
    """A base, adapters with virtual tokens, and one without."""

    def __init__(self, folder: Path, name: str) -> None:
        warnings.simplefilter("ignore")  # PEFT's own
        self.name, self.folder = name, folder
        self.base = tiny.make(name, folder / "base", seed=tiny.SEEDS.get(name, 0))
        self.adapters = {kind: kinds.make(kind, self.base, folder / kind) for kind in COUNTS}
        for number, path in enumerate(self.adapters.values()):
            weights = path / "adapter_model.safetensors"
            (tensor,) = load_file(weights).values()
            generator = torch.Generator().manual_seed(number)
            save_file({"prompt_embeddings": torch.randn(tensor.shape, generator=generator)}, weights)
        targets = {"gpt2": ["c_attn"]}.get(name, ["q_proj", "v_proj"])
        config = peft.LoraConfig(r=4, target_modules=targets, fan_in_fan_out=name == "gpt2")
        self.adapters["lora"] = making.make_adapter(self.base, folder / "lora", config)
        self.digests = lay_out(self.base, folder / "store", self.adapters)

    def request(self, prompt: list[int], kind: str, **fields: object) -> Request:
        count = COUNTS.get(kind, 0)
        ids = [*range(FIRST_VIRTUAL_ID, FIRST_VIRTUAL_ID + count), *prompt]
        request = Request((1, 0), ids, len(ids), NEW_TOKENS, num_virtual=count, num_scored=count)
        request.adapter_digest = self.digests[kind] if kind else ""
        for name, value in fields.items():
            setattr(request, name, value)
        return request

    def run(self, requests: list[Request], **settings: object) -> list[Output]:
        config = ShardConfig(
            self.name, str(self.base), "unix:/dev/null", dtype="float32", max_total_tokens=128,
            adapter_store=str(self.folder / "store"), max_active_adapters=6, step_tokens=23,
        )  # fmt: skip
        for index, request in enumerate(requests):
            request.key = (1, index)
        return outputs_of(replace(config, **settings), requests)  # type: ignore[arg-type]

    def by_peft(self, prompts: list[list[int]], chosen: list[str]) -> list[Text]:
        return oracle(self.base, self.adapters, chosen, prompts)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("virtual"), "llama")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_texts_in_one_batch_are_peft_s(name: str, tmp_path: Path) -> None:
    world = World(tmp_path, name)
    chosen = [*COUNTS, "", "lora", *COUNTS]
    prompts = prompts_of(name, tuple(3 + 5 * index for index in range(len(chosen))))
    drafts = [NO_SPECULATION, Speculation(Method.LOOKUP, 4)]
    requests = [
        world.request(prompt, kind, speculation=drafts[index % 2])
        for index, (prompt, kind) in enumerate(zip(prompts, chosen, strict=True))
    ]
    given = world.run(requests)
    wanted = world.by_peft(prompts, chosen)
    changed = not_of_base(world.base, prompts, [text.token_ids for text in wanted])
    assert sum(changed) >= 0.75 * len(chosen)  # the windows of gemma2 end before some prefixes
    tried = Tried(name, 4)
    compare(tried, wanted, [output.token_ids for output in given], chosen)
    assert not tried.differences, tried


def test_requests_share_the_pages_of_virtual_tokens(llama: World) -> None:
    """They do not count as tokens of the prompt."""
    (prompt,) = prompts_of("llama", (30,))
    requests = [llama.request(prompt, "PROMPT_TUNING") for _ in range(2)]
    first, second = llama.run(requests, max_running=1)
    assert (first.num_cached, second.num_cached) == (0, 12), "one page of 32, without 20 virtual tokens"
    assert first.token_ids == second.token_ids


def test_logprobs_and_penalties_are_those_of_the_prompt_s_tokens(llama: World) -> None:
    (prompt,) = prompts_of("llama", (12,))
    request = llama.request(
        prompt, "P_TUNING", logprobs=LogprobParams(wanted=True, prefill=True),
        sampling=SamplingParams(repetition_penalty=1.7),
    )  # fmt: skip
    (output,) = llama.run([request])
    model = peft.PeftModel.from_pretrained(load_plain(llama.base), str(llama.adapters["P_TUNING"])).eval()
    ids = torch.tensor([prompt])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].float()
    logprobs = logits.log_softmax(-1)[-len(prompt) :]
    wanted = [logprobs[index, token].item() for index, token in enumerate(prompt[1:])]
    assert output.details is not None
    assert output.details.prefill_logprobs == pytest.approx(wanted, abs=1e-4)
    last = logits[-1].clone()
    for token in set(prompt):
        last[token] = last[token] / 1.7 if last[token] > 0 else last[token] * 1.7
    assert output.token_ids[0] == int(last.argmax())
