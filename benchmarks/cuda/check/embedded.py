"""The embedded model in float32: one text in whatever way it is computed, which is that of the CPU."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.cuda.check.rows import Row, Rows
from benchmarks.cuda.engines import configured, room
from benchmarks.cuda.setup import Setup
from lorikeet.shard.model import load_model
from tests.oracles import family
from tests.oracles.family import BASE
from tests.shard.engine.harness import EngineHarness, EngineRequest

WAYS: dict[str, dict[str, Any]] = {
    "reference attention, modules, no graphs, lag 0": {
        "attention": "reference", "fusions": "none", "graphs": False, "commit_lag": 0,
    },
    "kernels, no graphs, lag 0": {"graphs": False, "commit_lag": 0},
    "kernels, graphs, lag 0": {"graphs": True, "commit_lag": 0},
    "kernels, graphs, lag 1": {"graphs": True, "commit_lag": 1},
}  # fmt: skip


def check(rows: Rows, setup: Setup, is_brief: bool) -> None:
    count, length = (16, 32) if setup.is_cuda else (2, 4)
    ids = family.encode(family.prompts("code", count))
    texts = _texts(replace(setup, device="cpu", is_smoke=True), ids, length, {})
    if "CPU" not in rows.done:
        rows.put("CPU", texts=len(texts))
    ways = WAYS if setup.is_cuda else {"reference attention": {"attention": "reference"}}
    for name, settings in ways.items():

        def compared(settings: dict[str, Any] = settings) -> Row:
            found = _texts(setup, ids, length, settings)
            num_different = sum(a != b for a, b in zip(texts, found, strict=True))
            return {"ok": not num_different, "differ": num_different, "of": len(texts)}

        rows.check(name, compared)


def _texts(setup: Setup, prompts: Sequence[list[int]], length: int, settings: dict[str, Any]) -> list[list[int]]:
    longest = max(map(len, prompts)) + length + 32
    with tempfile.TemporaryDirectory() as folder:
        given = {**room(setup, len(prompts), longest), "max_total_tokens": longest, "dtype": "float32",
                 "adapter_store": folder, **settings}  # fmt: skip
        config = configured(setup, BASE, **given)
        engine = EngineHarness(config, load_model(config))
        return [run.token_ids for run in engine.run([EngineRequest(ids, length) for ids in prompts])]
