"""The host's time of a decode step of Llama 3.1 8B as a multiple of a fixed loop in Python, without a device.

python -m tests.cuda.host_time

Scheduling, inputs, sampling and commit are the engine's; what it launches and copies is done by no device. Of this
thread alone, so that other processes disturb it little; compare two commits on one machine.
"""
# mypy: allow-untyped-calls

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from triton.runtime.jit import JITFunction

from benchmarks.cuda.setup import LLAMA_8B
from lorikeet.shard.model import Model
from tests.cuda.decode_step import model_of, stepping, without_values

BATCHES = (1, 8, 64, 256)
REPEATS, ROUNDS = 20, 3
LOOP = 20_000


def loop() -> int:
    total = 0
    for number in range(LOOP):
        total += number * number % 7
    return total


def least_seconds(work: Callable[[], object], repeats: int) -> float:
    """The least processor time of this thread."""
    found = []
    for _ in range(repeats):
        start = time.thread_time()
        work()
        found.append(time.thread_time() - start)
    return min(found)


def ratio_of(model: Model, batch: int, has_adapters: bool, repeats: int = REPEATS, rounds: int = ROUNDS) -> float:
    """Time of a step over that of the loop, which alternate."""
    with stepping(model, batch, has_adapters) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", lambda *_, **__: None)
        pairs = [(least_seconds(engine.step, repeats // rounds), least_seconds(loop, repeats)) for _ in range(rounds)]
    steps, loops = zip(*pairs, strict=True)
    return min(steps) / min(loops)


def main() -> None:
    print("adapters, batch: host time of a step / loop")
    with without_values():
        for has_adapters in (False, True):
            model = model_of(replace(LLAMA_8B, layers=1), has_adapters)
            for batch in BATCHES:
                print(f"{'yes' if has_adapters else 'no'}, {batch}: {ratio_of(model, batch, has_adapters):.3f}")


if __name__ == "__main__":
    main()
