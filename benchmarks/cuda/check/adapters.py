"""The large model with an adapter of all linears for each request: what they cost a step, a swap, and from disk."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from structlog.testing import capture_logs

from benchmarks.cuda import engines, swap
from benchmarks.cuda.check.large import MOST_TOKENS, warnings_in
from benchmarks.cuda.check.rows import Row, Rows
from benchmarks.cuda.served import Store, settings_of
from benchmarks.cuda.setup import Setup
from benchmarks.models.adapter_files import ALL
from lorikeet.shard.adapters.manager import CheckedFiles
from lorikeet.shard.model import Model
from lorikeet.shard.model.adapters.loading import HostLayout
from lorikeet.shard.model.lora.memory import Arena, PinnedMemory
from tests.shard.engine.harness import EngineHarness, EngineRequest

READ_BYTES = 1 << 30
"""Of pinned memory for reads without the engine."""
READS = 8
SPARE = 2
FROM_DISK, DISK_SLOTS = 12, 4


class Adapters:
    """An engine with slots, and adapters that it is asked for."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self._setup, self._folder = setup, folder
        self._idle: dict[int, float] = {}
        self._engine: EngineHarness | None = None
        self._model: Model | None = None
        self.digests: list[str] = []

    @property
    def engine(self) -> EngineHarness:
        if self._engine is None:
            raise RuntimeError("the engine did not start")
        return self._engine

    def start(self, num_slots: int, num_adapters: int, num_tokens: int) -> Row:
        setup = self._setup
        settings = {**engines.room(setup, num_slots, num_tokens), **settings_of(setup, self._folder, num_slots)}
        with capture_logs() as logs:
            config, model = engines.load(setup, setup.large, **settings)
            self.digests = Store(self._folder, model, setup.seed).loras(num_adapters, [setup.rank], ALL)
            self._engine, self._model = EngineHarness(config, model), model
        warnings = warnings_in(logs)
        return {"ok": not warnings, **({"warnings": warnings} if warnings else {})}

    def decode(self, count: int, digests: Sequence[str]) -> Row:
        asked = engines.wanted(self._setup, self._setup.large, count)
        if digests:
            asked = [replace(each, adapter_digest=digests[at % len(digests)]) for at, each in enumerate(asked)]
        self.engine.run(asked)
        found = engines.steadily(self.engine, asked)
        if not digests:
            self._idle[count] = found["seconds"]
        row = {"ms": 1e3 * found["seconds"], "gap_us": 1e6 * found["gap"], "tok_s": found["tokens_per_second"]}
        return row | ({"over_idle": found["seconds"] / self._idle[count]} if count in self._idle else {})

    def bring_in(self) -> Row:
        """One token by each, one after the other."""
        times = []
        for digest in self.digests:
            start = time.monotonic()
            self.engine.run([EngineRequest([1, 2], 1, adapter_digest=digest)])
            times.append(1e3 * (time.monotonic() - start))
        return {"ms_each": sum(times) / len(times), "first_ms": times[0], "longest_ms": max(times)}

    def read(self) -> Row:
        """A file in the page cache into host memory, with its checksum and without the engine."""
        assert self._model is not None
        targets, dtype = self._model.lora_targets, self._model.info.dtype
        kernels = next(iter(targets.values())).kernels
        memory = Arena(READ_BYTES) if kernels is None else PinnedMemory(READ_BYTES, is_pinned=self._setup.is_cuda)
        files = CheckedFiles(targets, HostLayout(dtype, memory, kernels))
        times = []
        for _ in range(READS):
            start = time.monotonic()
            num_bytes = files.read(self._folder / f"{self.digests[0]}.safetensors").num_bytes
            times.append(time.monotonic() - start)
        return {"ms": 1e3 * min(times), "first_ms": 1e3 * times[0], "gbs": num_bytes / min(times) / 1e9}

    def swap(self) -> Row:
        """Adapters that come from host memory while others decode."""
        setup = self._setup
        ids = engines.prompts(setup, setup.large, setup.swap_batch, setup.prompt)
        pairs = zip(ids, self.digests, strict=False)
        batch = [EngineRequest(each, swap_tokens(setup), adapter_digest=digest) for each, digest in pairs]
        self.bring_in()
        with engines.uncollected():
            raw = swap.run_round(self.engine, batch, self.digests[setup.swap_batch :], setup.swaps)
        return {"lengthening": swap.lengthening(raw), "longest": swap.longest(raw), "later_ms": swap.later_ms(raw)}


def swap_tokens(setup: Setup) -> int:
    """The tokens of an output that lasts while adapters come."""
    return setup.swaps * 2 * (swap.QUIET + 8)


def check(rows: Rows, setup: Setup, is_brief: bool) -> None:
    setup = replace(setup, text=min(setup.text, MOST_TOKENS), swaps=min(setup.swaps, 8))
    count = setup.requests
    with tempfile.TemporaryDirectory() as name:
        served = Adapters(setup, Path(name))
        num_tokens = setup.prompt + swap_tokens(setup)
        rows.check(
            "start with slots", lambda: served.start(count + SPARE, count + swap.CYCLE, num_tokens), is_needed=True
        )
        for each in (1, count):
            rows.check(f"decode {each}, slots idle", partial(served.decode, each, []))
        rows.check("bring all in", served.bring_in)
        rows.check("decode 1, one adapter", lambda: served.decode(1, served.digests[:1]))
        rows.check(f"decode {count}, one adapter", lambda: served.decode(count, served.digests[:1]))
        rows.check(f"decode {count}, {count} adapters", lambda: served.decode(count, served.digests[:count]))
        some = max(1, count // 8)
        rows.check(f"decode {count}, {some} with adapters", lambda: _some(served, setup, some))
        if not is_brief:
            rows.check("swap", served.swap)


def _some(served: Adapters, setup: Setup, some: int) -> Row:
    """Requests without an adapter in a batch with some."""
    return served.decode(setup.requests, [*served.digests[:some], *[""] * (setup.requests - some)])


def check_disk(rows: Rows, setup: Setup, is_brief: bool) -> None:
    """Adapters of one slot after the other: from files in the page cache, from host memory, and resident ones."""
    with tempfile.TemporaryDirectory() as name:
        served = Adapters(setup, Path(name))
        num_tokens = setup.prompt + setup.text
        rows.check("start with few slots", lambda: served.start(DISK_SLOTS, FROM_DISK, num_tokens), is_needed=True)
        rows.check("a file into host memory", served.read)
        rows.check("first token, from files", served.bring_in)
        rows.check("first token, from host memory", served.bring_in)
        served.digests = served.digests[-1:] * 6
        rows.check("first token, resident", served.bring_in)
