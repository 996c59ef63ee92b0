"""The cost and the speed-up of speculative decoding on a device: verification, heads, drafts, schedules."""

from functools import partial

from benchmarks.cuda.pairs import CHANCE, NUM_HEADS, Pair
from benchmarks.cuda.setup import LlamaShape, Setup
from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load.rounds import in_turn, speedup
from lorikeet.proto.params import NO_SPECULATION, Method, Schedule, Speculation

OFF, WIDE, DRAFTED, AUTO, REJECTED = "off", "wide", "drafted", "auto", "rejected"
HEADS, AS_WIDE = "heads", "as wide without heads"
LEARNING = 2
"""Runs before the first round, in which schedules learn."""


def measure(setup: Setup, shapes: tuple[LlamaShape, LlamaShape]) -> Cases:
    """One case per round: every way under every load by turns. shapes: of target and draft model."""
    pair = Pair(setup, *shapes)
    for number in range(-LEARNING, setup.long_rounds):
        raw = _round(setup, pair, number)
        if number >= 0:
            yield Case(f"round {number}", raw)


def _round(setup: Setup, pair: Pair, number: int) -> Raw:
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
        for way in in_turn(list(some), number):
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


def tau(batch: int, raw: Raw) -> float:
    """Tokens that a step gives one request."""
    return float(raw[f"{DRAFTED} {batch}"]["tau"])


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
