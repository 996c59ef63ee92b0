"""The dialled draft: a draft model that runs its real forward pass and is then made right with a chosen probability.

What the target writes is recorded first. Then, at each position of a recorded text, the draft model's token is replaced
by the recorded one with probability α, drawn once for every text and position by a fixed seed; where it isn't, it is
any other. So α is what the published tables take it for, while everything else is the engine's own: its planning, its
draft model's passes and KV, its verification and its counts. The engine has no branch for this.

    python -m benchmarks.dialled [--quick] [WIDTH…]
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks import published
from benchmarks.case import Case, Cases, Raw
from benchmarks.replay import iid_tokens_per_step

if TYPE_CHECKING:
    from benchmarks.harness import Run

SEED = 20_260_711
"""Of prompts and of what is right; fixed before anything was measured."""
TEXT, PROMPT = 1024, 8
"""Tokens of a text, and of the prompt before it."""
AT_ONCE = 192
TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 128, "max_position_embeddings": 2048,
}  # fmt: skip
TOKENS = 1_000_000
"""Of a row of LMFlow's table."""
DRAFTED = 500_000
"""For Xinference's share."""
SETTINGS: dict[str, Any] = {
    "seed": SEED,
    "text": TEXT,
    "prompt": PROMPT,
    "at_once": AT_ONCE,
    "model": TINY,
    "tokens": TOKENS,
    "drafted": DRAFTED,
    "chance": published.LMFLOW_CHANCE,
    "xinference_chance": published.XINFERENCE_CHANCE,
}


@dataclass(frozen=True)
class Size:
    """How much is run."""

    tokens: int = TOKENS
    drafted: int = DRAFTED
    texts: int = AT_ONCE
    """That are recorded."""
    text: int = TEXT
    widths: tuple[int, ...] = tuple(published.LMFLOW_FORWARDS)


QUICK = Size(16_384, 8_192, 16, widths=(1, 4, 10))


def tally(runs: "Sequence[Run]", width: int) -> dict[str, int]:
    """Sums over the steps that drafted in full: the last ones of a text have no room for all drafts."""
    full = [gave for run in runs for gave in run.steps if gave.num_drafted == width]
    return {
        "texts": len(runs),
        "tokens": sum(len(gave.token_ids) for gave in full),
        "forwards": len(full),
        "drafted": width * len(full),
        "accepted": sum(gave.num_accepted for gave in full),
        "all_tokens": sum(len(run.token_ids) for run in runs),
        "all_forwards": sum(len(run.steps) for run in runs),
    }


def forwards(finished: frozenset[str] = frozenset(), size: Size | None = None) -> Cases:
    """LMFlow's forwards column, one case per row."""
    size = size or Size()
    wanted = [width for width in size.widths if f"width {width}" not in finished]
    if not wanted:
        return
    from benchmarks.dial import Pair  # torch

    pair = Pair(size.texts, size.text)
    for width in wanted:
        num_texts = -(-size.tokens // (size.text - 2 * width - 2))
        raw = tally(pair.run(published.LMFLOW_CHANCE, width, num_texts, width), width)
        short = f"{raw['tokens']} tokens" if raw["tokens"] < size.tokens else ""
        yield Case(f"width {width}", {"width": width, **raw}, short)


def accepted(finished: frozenset[str] = frozenset(), size: Size | None = None) -> Cases:
    """Xinference's accepted over drafted."""
    size = size or Size()
    if "share" in finished:
        return
    width, chance = published.XINFERENCE_WIDTH, published.XINFERENCE_CHANCE
    from benchmarks.dial import Pair  # torch

    pair = Pair(size.texts, size.text)
    tokens = size.drafted * iid_tokens_per_step(chance, width) / width
    num_texts = int(1.02 * tokens / (size.text - 2 * width - 2)) + 1
    raw = tally(pair.run(chance, width, num_texts, 100), width)
    short = f"{raw['drafted']} drafted" if raw["drafted"] < size.drafted else ""
    yield Case("share", {"width": width, **raw}, short)


def tau(raw: Raw) -> float:
    return float(raw["tokens"] / raw["forwards"])


def off_published(raw: Raw) -> float:
    """Distance of a row from LMFlow's."""
    return abs(tau(raw) - published.LMFLOW_FORWARDS[raw["width"]])


def off_share(raw: Raw) -> float:
    """Distance of accepted over drafted from Xinference's."""
    return abs(raw["accepted"] / raw["drafted"] - published.XINFERENCE_ACCEPTED)


def main() -> None:
    size = QUICK if "--quick" in sys.argv else Size()
    widths = tuple(int(word) for word in sys.argv[1:] if word.isdigit())
    size = replace(size, widths=widths or size.widths)
    print(f"| drafts | tokens | tokens per step at α = {published.LMFLOW_CHANCE} | 1 + α + … | LMFlow |")
    print("|---|---|---|---|---|")
    told = []
    for case in forwards(size=size):
        raw, width = case.raw, case.raw["width"]
        ideal = iid_tokens_per_step(published.LMFLOW_CHANCE, width)
        row = f"| {width} | {raw['tokens']} | {tau(raw):.3f} | {ideal:.3f} | {published.LMFLOW_FORWARDS[width]} |"
        print(row, case.error, flush=True)
        told.append(case.raw)
    for case in accepted(size=size):
        share = case.raw["accepted"] / case.raw["drafted"]
        print(
            f"accepted/drafted at α = {published.XINFERENCE_CHANCE}, {case.raw['width']} drafts: {share:.4f} ", end=""
        )
        print(f"of {case.raw['drafted']} (Xinference {published.XINFERENCE_ACCEPTED}) {case.error}")
        told.append(case.raw)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
