"""What adapters cost a full batch: none, distinct ones, mixed ranks, and many more in rotation than have slots.

Two engines of equal models, one of which serves adapters, by turns in one process.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.cuda import engines
from benchmarks.cuda.served import Store
from benchmarks.cuda.setup import Setup, step_bytes
from benchmarks.evidence.figure import Cases, Raw, in_rounds
from benchmarks.load.rounds import in_turn, speedup
from benchmarks.models.adapter_files import ALL, ATTENTION
from tests.shard.engine.harness import EngineHarness, EngineRequest

BARE, IDLE, DISTINCT, MIXED, RESIDENT, ROTATION = "bare", "idle", "distinct", "mixed ranks", "resident", "rotation"
WAYS = (BARE, IDLE, DISTINCT, MIXED, RESIDENT, ROTATION)
SLOT_SHARE = 0.3
"""Share of the device's memory: a batch of mixed ranks takes about 17 GB, one of rank 16 five."""
HOST_BYTES = 56 << 30
"""All of them stay in host memory: 28 GB of the rotation, 17 of the mixed ranks, five of rank 16, and room."""


class Served:
    """An engine that serves adapters, and the digests of those that it is asked for."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        longest = setup.prompt + 2 * setup.text
        settings = {**engines.room(setup, setup.requests, longest), **settings_of(setup, folder, setup.requests)}
        config, model = engines.load(setup, setup.large, **settings)
        store = Store(folder, model, setup.seed)
        self.digests = {
            DISTINCT: store.loras(setup.requests, [setup.rank], ALL),
            MIXED: store.loras(setup.requests, setup.ranks, ALL),
            ROTATION: store.loras(setup.adapters, [setup.rank], ATTENTION),
        }
        self.digests[RESIDENT] = self.digests[ROTATION][: setup.requests]
        self.engine = EngineHarness(config, model)
        self._setup, self._next = setup, 0

    def bring_in(self, digests: Sequence[str]) -> None:
        """One token by each, so that it is in host memory, the last ones in slots."""
        self.engine.run([EngineRequest([1, 2], 1, adapter_digest=digest) for digest in digests])

    def rotate(self, way: str) -> list[EngineRequest]:
        """`laps` requests for each slot, of lengths around the usual one, each with the adapter whose turn it is."""
        setup, digests = self._setup, self.digests[way]
        count = setup.laps * setup.requests
        ids = engines.prompts(setup, setup.large, count, setup.prompt, seed=1)
        first = self._next if way == ROTATION else 0
        self._next += count if way == ROTATION else 0
        shortest = setup.text // 2
        return [
            EngineRequest(
                prompt, shortest + (7 * number) % setup.text, adapter_digest=digests[(first + number) % len(digests)]
            )
            for number, prompt in enumerate(ids)
        ]


def settings_of(setup: Setup, folder: Path, num_slots: int) -> dict[str, object]:
    """Settings of a shard with so many slots."""
    host = HOST_BYTES if setup.is_cuda else 2**27
    return {
        "adapter_store": str(folder),
        "max_active_adapters": num_slots,
        "adapter_memory_fraction": SLOT_SHARE,
        "adapter_host_memory": host,
    }


def measure(setup: Setup) -> Cases:
    """One case per round: tokens per second of every way, by turns."""
    longest = setup.prompt + 2 * setup.text
    bare = engines.engine(setup, setup.large, setup.requests, longest)
    with tempfile.TemporaryDirectory() as folder:
        served = Served(setup, Path(folder))
        served.bring_in(served.digests[ROTATION])
        yield from in_rounds(
            setup.long_rounds, lambda number: {way: _run(setup, way, bare, served) for way in in_turn(WAYS, number)}
        )


def _run(setup: Setup, way: str, bare: EngineHarness, served: Served) -> Raw:
    plain = engines.wanted(setup, setup.large, setup.requests)
    if way == BARE:
        return engines.steadily(bare, plain)
    if way == IDLE:
        return engines.steadily(served.engine, plain)
    if way == ROTATION:
        return engines.total(served.engine.run(served.rotate(way)))
    served.bring_in(served.digests[way])
    if way == RESIDENT:
        return engines.total(served.engine.run(served.rotate(way)))
    asked = zip(plain, served.digests[way], strict=True)
    return engines.steadily(served.engine, [replace(each, adapter_digest=digest) for each, digest in asked])


def share_by_bytes(setup: Setup, way: str, raw: Raw) -> float:
    """Tokens per second over those without adapters, times what a step reads with adapters over what it reads without:
    1 if both read at the same speed.
    """
    shape, ranks = setup.large, setup.ranks if way == MIXED else (setup.rank,)
    num_ranks = sum(ranks[number % len(ranks)] for number in range(setup.requests))
    adapters = 2 * shape.layers * num_ranks * sum(num_out + num_in for num_out, num_in in shape.linears)
    base = step_bytes(shape, setup.requests * (setup.prompt + setup.text / 2))
    return speedup(way, BARE, raw) * (base + adapters) / base
