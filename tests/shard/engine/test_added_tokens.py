"""Adapters that add tokens to the base's: each request in a mixed batch gets what PEFT gives it alone."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from lorikeet.adapters.formats import heads as files
from lorikeet.adapters.formats.heads import MedusaShape
from lorikeet.proto.params import LogprobParams, Method, SamplingParams, Speculation
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import load_model
from lorikeet.shard.requests.request import Request
from tests import tiny
from tests.adapters import making
from tests.adapters.medusa import small
from tests.shard.engine.adapter_exactness import Text, Tried, compare, lay_out, load_plain, oracle, outputs_of
from tests.shard.engine.exactness import NEW_TOKENS, prompts_of

SIZE, EXTRA = 320, 6
ADDED = (SIZE, SIZE + 1)
LOOKUP, HEADS = Speculation(Method.LOOKUP, 4), Speculation(Method.MEDUSA, 0, 3)
TARGETS = ["q_proj", "v_proj", "down_proj"]
ENDS = ["embed_tokens", "lm_head"]
CONFIGS: dict[str, Callable[[], peft.PeftConfig]] = {
    "whole ends": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, modules_to_save=ENDS),
    "whole embedding": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, modules_to_save=ENDS[:1]),
    "trained tokens": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, trainable_token_indices=[5, *ADDED]),
    "trained tokens of both": lambda: peft.LoraConfig(
        r=4, target_modules=TARGETS, trainable_token_indices={end: [5, *ADDED] for end in ENDS}
    ),
    "no trained tokens": lambda: peft.LoraConfig(r=4, target_modules=TARGETS),
    "LoRA on ends": lambda: peft.LoraConfig(r=4, target_modules=[*TARGETS, *ENDS]),
    "IA3": lambda: peft.IA3Config(task_type="CAUSAL_LM"),
}
NUM_ADDED = {"whole embedding": 5, "no trained tokens": 3}
"""Where it is not 2."""


def resized(base: Path, num_added: int) -> Any:
    """The base as a caller of PEFT prepares it."""
    network = load_plain(base)
    torch.manual_seed(0)
    network.resize_token_embeddings(SIZE + num_added)
    with torch.no_grad():  # so that a network without an adapter chooses them too
        for end in {network.get_input_embeddings(), network.get_output_embeddings()}:
            end.weight[SIZE:].normal_(std=1.5 * float(end.weight[:SIZE].std()))
    return network


def make(name: str, base: Path, folder: Path) -> Path:
    """Have PEFT save the adapter, with values as after training."""
    torch.manual_seed(len(name))
    model = peft.get_peft_model(resized(base, NUM_ADDED.get(name, 2)), CONFIGS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_added_tokens_in_a_mixed_batch(is_tied: bool, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")  # PEFT's own, about merging and training
    base = tiny.make("llama", tmp_path / "base", seed=1, tie_word_embeddings=is_tied)
    adapters = {name: make(name, base, tmp_path / name) for name in CONFIGS}
    adapters["plain"] = making.make_adapter(base, tmp_path / "plain", peft.LoraConfig(r=4, target_modules=TARGETS))
    files.write(tmp_path / "heads", small.heads(MedusaShape(3, 1, 64), scale=0.01))
    digests = lay_out(base, tmp_path / "store", {**adapters, "heads": tmp_path / "heads"}, num_extra=EXTRA)
    names = [name for name in [*adapters, ""] for _ in range(2)]
    prompts = prompts_of("llama", tuple(5 + 2 * number for number in range(len(names))))
    for prompt, name in zip(prompts, names, strict=True):
        if name in CONFIGS:
            prompt[1:3] = ADDED
    expected: list[Text] = []
    for first in range(0, len(names), 2):
        name = names[first]
        network = resized(base, NUM_ADDED.get(name, 2)) if name in CONFIGS else load_plain(base)
        expected += oracle(base, adapters, [name] * 2, prompts[first : first + 2], lambda _, network=network: network)
    assert sum(max(text.token_ids) >= SIZE for text in expected) >= 4, "texts without added tokens prove little"
    requests = [
        Request((1, index), list(prompt), len(prompt), NEW_TOKENS, adapter_digest=digests[name] if name else "")
        for index, (prompt, name) in enumerate(zip(prompts, names, strict=True))
    ]
    for request in requests:
        request.speculation = HEADS if request.key[1] % 2 else LOOKUP
        request.heads_digest = digests["heads"] if request.key[1] % 2 else ""
    config = ShardConfig(
        "llama", str(base), "unix:/dev/null", dtype="float32", max_total_tokens=128, step_tokens=40,
        adapter_store=str(tmp_path / "store"), max_active_adapters=12, speculation_max_batch_size=32,
        adapter_extra_vocab_size=EXTRA,
    )  # fmt: skip
    outputs = outputs_of(config, requests)
    tried = Tried("llama", 12)
    compare(tried, expected, [output.token_ids for output in outputs], names)
    assert not tried.differences, tried
    assert tried.num_ties <= 1, tried


def test_other_requests_get_the_bits_of_a_server_without_such_tokens(tmp_path: Path) -> None:
    """Hot samples, penalties and log probabilities would show an id behind the base's, and any weight on one."""
    warnings.simplefilter("ignore")
    base = tiny.make("llama", tmp_path / "base", seed=1)
    plain = making.make_adapter(base, tmp_path / "plain", peft.LoraConfig(r=4, target_modules=TARGETS))
    adding = make("trained tokens", base, tmp_path / "adding")
    given = []
    for num_extra, adapters in ((0, {"plain": plain}), (EXTRA, {"plain": plain, "adding": adding})):
        store = tmp_path / f"store-{num_extra}"
        digests = lay_out(base, store, adapters, num_extra=num_extra)
        names = ["", "plain"] * 4 + ["adding"] * 4 * (num_extra > 0)
        requests = []
        for index, (prompt, name) in enumerate(zip(prompts_of("llama", (9,) * len(names)), names, strict=True)):
            request = Request((1, index), list(prompt), len(prompt), 40, adapter_digest=digests.get(name, ""))
            bias = tuple((token, 300.0) for token in range(SIZE, SIZE + EXTRA)) if name == "adding" else ()
            typical = 0.99 if index % 2 else 1.0
            request.sampling = SamplingParams(
                True, 50.0, seed=index, repetition_penalty=1.5, typical_p=typical, logit_bias=bias
            )
            request.logprobs = LogprobParams(wanted=True, alternatives=5)
            requests.append(request)
        config = ShardConfig(
            "llama", str(base), "unix:/dev/null", dtype="float32", max_total_tokens=128, adapter_store=str(store),
            max_active_adapters=4, adapter_extra_vocab_size=num_extra,
        )  # fmt: skip
        given.append(outputs_of(config, requests))
    without, together = given
    for before, after in zip(without, together, strict=False):
        assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
        assert after.details == before.details and before.details is not None
    own = [token for output in together[len(without) :] for token in output.token_ids]
    assert set(ADDED) <= set(own) and max(own) < SIZE + 2, "all tokens of the adapter, and no others"


def test_where_rows_cannot_be_added_the_server_does_not_start(tmp_path: Path) -> None:
    base = tiny.make("llama", tmp_path / "base", seed=1)
    config = ShardConfig("llama", str(base), "unix:/dev/null", adapter_extra_vocab_size=EXTRA, quantize="int8")
    with pytest.raises(ValueError, match="plain weights on one device"):
        load_model(config)
