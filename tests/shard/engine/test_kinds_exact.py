"""Adapters of every kind that PEFT writes, in one batch with drafts, give what PEFT gives each request alone."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest

from lorikeet.adapters.formats import heads as files
from lorikeet.adapters.formats.heads import MedusaShape
from lorikeet.proto.params import Method, Speculation
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.requests.request import Request
from tests import tiny
from tests.adapters import kinds
from tests.adapters.medusa import small
from tests.shard.engine.adapter_exactness import Tried, compare, lay_out, not_of_base, oracle, outputs_of
from tests.shard.engine.exactness import NEW_TOKENS, prompts_of

LOOKUP, HEADS = Speculation(Method.LOOKUP, 4), Speculation(Method.MEDUSA, 0, 3)
SIXTEEN = (
    "DoRA", "ADALORA", "MISS", "VERA", "LN_TUNING", "RANDLORA", "TINYLORA", "IA3", "OFT", "LOHA", "BEFT",
    "trained tokens", "whole ends", "BD-LoRA", "QALoRA", "KaSA",
)  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> None:
    warnings.simplefilter("ignore")  # PEFT's own, about merging and training


@pytest.mark.parametrize(
    "names", [SIXTEEN, pytest.param(tuple(kinds.CONFIGS), marks=pytest.mark.long)], ids=["sixteen", "every"]
)
def test_kinds_in_one_batch_give_what_peft_gives(names: Sequence[str], tmp_path: Path) -> None:
    base = tiny.make("llama", tmp_path / "base", seed=1)
    adapters = {name: kinds.make(name, base, tmp_path / name) for name in names}
    files.write(tmp_path / "heads", small.heads(MedusaShape(3, 1, 64), scale=0.01))
    digests = lay_out(base, tmp_path / "store", {**adapters, "heads": tmp_path / "heads"})
    chosen = [*names, ""]
    prompts = prompts_of("llama", tuple(5 + 2 * (number % 16) for number in range(len(chosen))))
    expected = oracle(base, adapters, chosen, prompts)
    changed = not_of_base(base, prompts, [text.token_ids for text in expected])[:-1]
    assert sum(changed) > 0.8 * len(changed), "adapters that change nothing prove nothing"
    requests = [
        Request((1, index), list(prompt), len(prompt), NEW_TOKENS, adapter_digest=digests[name] if name else "")
        for index, (prompt, name) in enumerate(zip(prompts, chosen, strict=True))
    ]
    for request in requests:
        request.speculation = HEADS if request.key[1] % 2 else LOOKUP
        request.heads_digest = digests["heads"] if request.key[1] % 2 else ""
    config = ShardConfig(
        "llama", str(base), "unix:/dev/null", dtype="float32", max_total_tokens=128, step_tokens=40,
        adapter_store=str(tmp_path / "store"), max_active_adapters=20, speculation_max_batch_size=32,
    )  # fmt: skip
    outputs = outputs_of(config, requests)
    tried = Tried("llama", 20)
    compare(tried, expected, [output.token_ids for output in outputs], chosen)
    assert not tried.differences, tried
    assert tried.num_ties <= 1, tried
