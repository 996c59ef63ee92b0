"""One architecture through everything that must not change its text: model alone, engine, chunks, prefix hits, too few
pages, commit lag.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lorikeet.shard.config import ShardConfig
from tests import tiny
from tests.shard.engine import exactness

TOTAL = 128
SHORT_TOTAL = tiny.ORIGINAL_LENGTH
"""So many tokens per request select the other set of longrope factors."""

PAGE_SIZE = 32
"""On a device, whose pages may else be so large that few of them are many."""


@dataclass(frozen=True)
class Way:
    """How sixteen concurrent requests are run through the engine."""

    settings: Mapping[str, Any]
    rounds: int = 1
    preempts: bool = False
    """Somebody must be preempted, else the way shows nothing."""
    hits: bool = False
    """Prompt tokens must be found in the prefix cache, else the way shows nothing."""


WAYS = {
    "all at once": Way({}),
    "seven prompt tokens a step": Way({"step_tokens": 7}),
    "prefix hits": Way({}, rounds=2, hits=True),
    "few pages": Way({"num_pages": 7}, preempts=True),
    "commit lag": Way({"commit_lag": 1}),
}


def run(name: str, folder: Path, device: str = "cpu", tie: float = exactness.TIE) -> list[dict[str, Any]]:
    """Every way of one architecture; each has tokens, ties, differences and the fewest distinct tokens of a text."""
    prompts = exactness.prompts_of(name, tiny.LENGTHS)
    expected = exactness.make_lively(name, folder, prompts, TOTAL)
    runs = [_alone(name, folder, TOTAL, tiny.LENGTHS, device, tie)]
    if "longrope" in name:
        short = tuple(length for length in tiny.LENGTHS if length + exactness.NEW_TOKENS <= SHORT_TOTAL)
        runs.append(_alone(name, folder, SHORT_TOTAL, short, device, tie))
    config = ShardConfig(
        name, str(folder), "unix:/dev/null", device=device, dtype="float32", max_total_tokens=TOTAL, num_pages=80,
        prefix_caching=True, page_size=None if device == "cpu" else PAGE_SIZE,
    )  # fmt: skip
    runs += [_engine(way, WAYS[way], config, (prompts, expected), tie) for way in WAYS]
    if device != "cpu":
        own = replace(config, device="cpu", page_size=None)
        runs.append(_engine("our own CPU", Way({}), own, (prompts, expected), tie))
    return runs


def _alone(
    name: str, folder: Path, max_total_tokens: int, lengths: tuple[int, ...], device: str, tie: float
) -> dict[str, Any]:
    """The model without the engine, where log probabilities can be compared too."""
    tried = exactness.check(name, folder, max_total_tokens=max_total_tokens, lengths=lengths, device=device, tie=tie)
    return {"way": f"model, {max_total_tokens} tokens", **asdict(tried)}


def _engine(
    name: str, way: Way, config: ShardConfig, texts: tuple[list[list[int]], list[exactness.Continued]], tie: float
) -> dict[str, Any]:
    """texts: prompts, and what the oracle wrote after them."""
    prompts, expected = texts
    result = exactness.through_engine(replace(config, **way.settings), prompts, way.rounds)
    found: dict[str, Any] = {"way": name, "num_tokens": 0, "num_ties": 0, "differences": []}
    for index, text in enumerate(result.texts):
        want = expected[index % len(expected)]
        same = next((i for i, pair in enumerate(zip(want.token_ids, text, strict=False)) if pair[0] != pair[1]), None)
        if same is None and len(text) == len(want.token_ids):
            found["num_tokens"] += len(text)
            continue
        at = len(text) if same is None else same
        found["num_tokens"] += at
        best = want.logprobs[min(at, len(want.token_ids) - 1)].topk(2).values
        if same is not None and best[0] - best[1] < tie:
            found["num_ties"] += 1
        else:
            found["differences"].append(f"request {index} differs at token {at}")
    if len(result.texts) != way.rounds * len(prompts):
        found["differences"].append(f"{len(result.texts)} texts")
    if way.preempts and not result.num_preempted:
        found["differences"].append("nobody was preempted")
    if way.hits and not result.num_cached:
        found["differences"].append("no prefix was found")
    return {**found, "num_preempted": result.num_preempted, "num_cached": result.num_cached}
