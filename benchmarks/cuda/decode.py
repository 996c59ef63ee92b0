"""Decoding against the card's floors, and against transformers' own continuous batching. Knows steps and seconds."""

from dataclasses import asdict

from benchmarks.case import Case, Cases, Raw
from benchmarks.cuda import engines, speeds
from benchmarks.cuda.peer import Peer
from benchmarks.cuda.setup import Setup, Speeds, floors
from benchmarks.harness import Harness


def batches(setup: Setup) -> tuple[int, ...]:
    return 1, setup.requests


def measure(setup: Setup, finished: frozenset[str] = frozenset()) -> Cases:
    """One case per round: what a step takes alone and in a full batch, and the least that it could."""
    shape = setup.large
    ours = engines.usual(setup)
    for batch in batches(setup):
        ours.run(engines.wanted(setup, shape, batch))  # warms up
    for number in range(setup.rounds):
        if f"round {number}" in finished:
            continue
        found = speeds.measured(setup)
        raw = {f"batch {batch}": _step(setup, ours, batch, found) for batch in batches(setup)}
        yield Case(f"round {number}", {**asdict(found), **raw})


def _step(setup: Setup, ours: Harness, batch: int, found: Speeds) -> Raw:
    told = engines.steadily(ours, engines.wanted(setup, setup.large, batch))
    num_kv_tokens = batch * (setup.prompt + setup.text / 2)
    by_bandwidth, by_products = floors(setup.large, batch, num_kv_tokens, found)
    return {**told, "kv_tokens": num_kv_tokens, "by_bandwidth": by_bandwidth, "by_products": by_products}


def share_of_floor(batch: int, raw: Raw) -> float:
    """The larger floor over what a step took."""
    told = raw[f"batch {batch}"]
    return float(max(told["by_bandwidth"], told["by_products"]) / told["seconds"])


def milliseconds(batch: int, raw: Raw) -> float:
    return 1e3 * float(raw[f"batch {batch}"]["seconds"])


def against_peer(setup: Setup, finished: frozenset[str] = frozenset()) -> Cases:
    """One case per round: as many requests at once through us and through transformers, prompts included."""
    shape = setup.large
    ours, theirs = engines.usual(setup), Peer(setup, shape)
    wanted = engines.wanted(setup, shape, setup.requests)
    ids = [list(each.prompt_ids) for each in wanted]
    ours.run(wanted)
    theirs.run(ids[:2], setup.text)
    for number in range(setup.long_rounds):
        if f"round {number}" not in finished:
            told = {"ours": engines.total(ours.run(wanted)), "transformers": theirs.run(ids, setup.text)}
            yield Case(f"round {number}", told)


def over_peer(raw: Raw) -> float:
    return float(raw["ours"]["tokens_per_second"] / raw["transformers"]["tokens_per_second"])
