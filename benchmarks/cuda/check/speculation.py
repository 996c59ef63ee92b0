"""The cost and the speed-up of speculative decoding on a device: verification, heads, drafts, schedules; and prompt
lookup with a host that plans while the device computes.
"""

import time
from functools import partial

from benchmarks.cuda import engines
from benchmarks.cuda.check.large import Engines
from benchmarks.cuda.check.rows import Row, Rows
from benchmarks.cuda.pairs import CHANCE, NUM_HEADS, Pair
from benchmarks.cuda.setup import LlamaShape, Setup
from benchmarks.evidence.figure import Raw
from benchmarks.load.rounds import speedup
from lorikeet.proto.params import NO_SPECULATION, Method, Schedule, Speculation
from tests.shard.engine.harness import EngineHarness, EngineRequest

OFF, WIDE, DRAFTED, AUTO, REJECTED = "off", "wide", "drafted", "auto", "rejected"
HEADS, AS_WIDE = "heads", "as wide without heads"
LEARNING = 2
"""Rounds before the one that is measured, in which schedules learn."""
ARRIVING, APART = 8, 3
"""Requests that arrive one by one, and steps between two."""


def check(rows: Rows, setup: Setup, is_brief: bool) -> None:
    for model, shapes in (("large", (setup.large, setup.small)), ("small", (setup.small, setup.draft))):
        rows.check(f"{model} model", partial(_costs, rows, setup, model, shapes))
    made = Engines(rows, setup, setup.large)
    num_tokens = setup.prompt + setup.text
    for lag in (0, 1):
        rows.check(f"start with lag {lag}", partial(made.start, f"lag {lag}", ARRIVING, num_tokens, commit_lag=lag),
                   is_needed=True)  # fmt: skip
    rows.check("lookup, staggered arrivals", lambda: _staggered(setup, made.made))


def _costs(rows: Rows, setup: Setup, model: str, shapes: tuple[LlamaShape, LlamaShape]) -> Row:
    """Costs over a plain step; a row per load. shapes: of target and draft model."""
    pair = Pair(setup, *shapes)
    for _ in range(LEARNING):
        _round(setup, pair)
    raw = _round(setup, pair)
    for load in setup.loads:
        result = raw[f"{DRAFTED} {load}"]
        values = {"tau": result["tau"], "speed_up": speed_up(load, raw), "efficiency": efficiency(load, raw)}
        rows.put(f"{model} model, {load} at once", **values)
    return {
        "verification": cost(raw), "heads": heads_cost(raw), "step_with_heads": heads_step(raw),
        "draft_token": draft_cost(raw), "auto_over_off": worst_schedule(setup.loads, raw),
    }  # fmt: skip


def _staggered(setup: Setup, made: dict[str, EngineHarness]) -> Row:
    """Tokens per second of commit lag 1 over lag 0."""
    rates = {}
    for name, harness in made.items():
        for number in range(2):  # the first one warms up
            rates[name] = _arrive(setup, harness, number)
    return {"tok_s": rates["lag 1"], "over_lag_0": rates["lag 1"] / rates["lag 0"]}


def _arrive(setup: Setup, harness: EngineHarness, number: int) -> float:
    """Prompts that repeat themselves, so that drafts are found. Returns tokens per second."""
    speculation = Speculation(Method.LOOKUP, setup.width)
    start = time.perf_counter()
    runs = []
    for ids in engines.prompts(setup, setup.large, min(ARRIVING, setup.requests), setup.prompt // 2, seed=number):
        runs += harness.submit([EngineRequest([*ids, *ids], setup.text, speculation)])
        for _ in range(APART):
            harness.turn()
    harness.finish()
    return sum(len(run.token_ids) for run in runs) / (time.perf_counter() - start)


def _round(setup: Setup, pair: Pair) -> Raw:
    """Every way under every load."""
    fixed = partial(Speculation, num_tokens=setup.width)
    auto = Speculation(Method.DRAFT, 2 * setup.width, schedule=Schedule.AUTO)
    ways: dict[str, tuple[Speculation, float]] = {
        OFF: (NO_SPECULATION, CHANCE),
        WIDE: (fixed(Method.LOOKUP), CHANCE),
        DRAFTED: (fixed(Method.DRAFT), CHANCE),
        AUTO: (auto, CHANCE),
        REJECTED: (auto, 0.0),
    }
    alone = {
        HEADS: (Speculation(Method.MEDUSA, 0, NUM_HEADS), CHANCE),
        AS_WIDE: (Speculation(Method.LOOKUP, NUM_HEADS), CHANCE),
    }
    raw: dict[str, object] = {"width": setup.width, "weight_ratio": pair.weight_ratio}
    for batch in setup.loads:
        some = {**ways, **alone} if batch == 1 else ways
        for way in some:
            raw[f"{way} {batch}"] = pair.run(batch, *some[way], way)
    return raw


def phases(result: Raw) -> float:
    """Seconds that a step with drafts takes on the device."""
    return float(result["proposing"] + result["verifying"] + result["accepting"])


def cost(raw: Raw, way: str = WIDE) -> float:
    """v: verification alone over a plain step."""
    result = raw[f"{way} 1"]
    return float(result["verifying"] + result["accepting"]) / float(raw[f"{OFF} 1"]["seconds"])


def heads_cost(raw: Raw) -> float:
    """A step that verifies drafts of heads and computes new ones, over one that verifies as many of lookup."""
    with_heads, without = raw[f"{HEADS} 1"], raw[f"{AS_WIDE} 1"]
    return float((with_heads["verifying"] + with_heads["accepting"]) / (without["verifying"] + without["accepting"]))


def heads_step(raw: Raw) -> float:
    """All of a step with heads, the host's part too, over a plain one."""
    return float(raw[f"{HEADS} 1"]["seconds"] / raw[f"{OFF} 1"]["seconds"])


def draft_cost(raw: Raw) -> float:
    """c: a token of the draft model over a plain step, over the ratio of weights."""
    each = float(raw[f"{DRAFTED} 1"]["proposing"]) / int(raw["width"])
    return each / float(raw[f"{OFF} 1"]["seconds"]) / float(raw["weight_ratio"])


def speed_up(batch: int, raw: Raw) -> float:
    """How many times faster with drafts."""
    return speedup(f"{DRAFTED} {batch}", f"{OFF} {batch}", raw)


def efficiency(batch: int, raw: Raw) -> float:
    """η: times faster over τ / (γc + v), the costs being what the device spends on drafts and verification."""
    result, plain = raw[f"{DRAFTED} {batch}"], raw[f"{OFF} {batch}"]
    return speed_up(batch, raw) / (float(result["tau"]) * float(plain["seconds"]) / phases(result))


def worst_schedule(loads: tuple[int, ...], raw: Raw) -> float:
    """Schedule auto over off, with drafts that are usually accepted and with drafts that never are; the lower one."""
    return min(speedup(f"{way} {batch}", f"{OFF} {batch}", raw) for way in (AUTO, REJECTED) for batch in loads)
