"""One batch of many adapters gives each request what PEFT gives it alone, with fewer slots than adapters.

test_architectures.py does the same for all architectures, and with room for all.
"""

from pathlib import Path

import pytest

from lorikeet.shard.config import ShardConfig
from lorikeet.shard.grpc.streams import Commands, Inbox, Outbox, StreamOpened
from lorikeet.shard.model import layers, load_model
from lorikeet.shard.requests.request import Request
from lorikeet.shard.scheduler.adapter_slots import DAMAGED, NOT_HERE
from lorikeet.shard.startup.build import build_engine
from tests import tiny
from tests.shard.engine import adapter_exactness
from tests.shard.engine.adapter_exactness import FEW_SLOTS, check, configs_of
from tests.shard.engine.exactness import MIN_DISTINCT


@pytest.mark.parametrize(
    "name", ["llama", pytest.param("gpt2", marks=pytest.mark.long), pytest.param("mixtral", marks=pytest.mark.long)]
)
def test_every_request_gets_what_peft_gives_it_alone(name: str, tmp_path: Path) -> None:
    [tried] = check(name, tmp_path, num_slots=[FEW_SLOTS])
    assert tried.num_distinct >= MIN_DISTINCT, "a text that repeats itself proves nothing"
    assert tried.share_changed >= 0.9, "adapters that change nothing prove nothing"
    assert not tried.differences and tried.num_ties == 0, tried


def test_experts_that_are_not_packed_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on devices, but for the kernels of adapters."""
    monkeypatch.setattr(layers, "can_pack", lambda dtype: False)
    monkeypatch.setattr(adapter_exactness, "NEW_TOKENS", 8)
    monkeypatch.setattr(adapter_exactness, "MIN_DISTINCT", 0)
    names = ("experts", "router", "dora", "attention")
    some = {name: config for name, config in configs_of("mixtral").items() if name in names}
    monkeypatch.setattr(adapter_exactness, "configs_of", lambda name: some)
    [tried] = check("mixtral", tmp_path, num_slots=[FEW_SLOTS])
    assert not tried.differences and tried.num_ties == 0 and tried.share_changed == 1, tried


def test_a_request_fails_alone_when_its_adapter_cannot_be_read(tmp_path: Path) -> None:
    folder, store = tiny.make("llama", tmp_path / "model"), tmp_path / "store"
    store.mkdir()
    (store / ("b" * 64 + ".safetensors")).write_bytes(b"nonsense")
    config = ShardConfig(
        "llama", str(folder), "unix:/dev/null", dtype="float32", max_total_tokens=128, adapter_store=str(store),
        max_active_adapters=4,
    )  # fmt: skip
    inbox, outbox = Inbox(), Outbox()
    engine = build_engine(config, load_model(config), inbox, outbox)
    outbox.open(1, wake=lambda: None)
    inbox.put(StreamOpened(1))
    digests = ["", "a" * 64, "b" * 64]
    inbox.put(Commands(1, submits=[Request((1, i), [1, 2, 3], 3, 4, adapter_digest=d) for i, d in enumerate(digests)]))
    errors: dict[int, str] = {}
    while len(errors) < 3:
        engine.step()
        if not engine.scheduler.running:
            inbox.wait(0.05)
        errors |= {output.key[1]: output.error for output in outbox.take(1).request_outputs() if output.finish_reason}
    assert errors[0] == "" and errors[1] == NOT_HERE and errors[2] == DAMAGED
    engine.scheduler.check()
