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
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import published
from benchmarks.case import Case, Cases, Raw
from benchmarks.harness import Harness, Run, Wanted, random_llama
from benchmarks.replay import iid_tokens_per_step
from shard.config import ShardConfig
from shard.model import Model, load_model
from shard.request import Method, Request, Schedule, Speculation

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


@dataclass
class Dial:
    """What the draft model is to be right about."""

    chance: float
    recorded: Sequence[Sequence[int]]
    """By number of text, prompt and output."""
    round: int = 0
    """Another one, other positions."""
    _live: list[tuple[Request, npt.NDArray[np.int64], npt.NDArray[np.bool_]]] = field(default_factory=list)

    def began(self, number: int, request: Request) -> None:
        """`request` writes recorded text `number`, counted round and round."""
        ids = np.asarray(self.recorded[number % len(self.recorded)], np.int64)
        self._live.append((request, ids, self.right(number, len(ids))))

    def right(self, number: int, length: int) -> npt.NDArray[np.bool_]:
        """At which positions of text `number` the draft model is right."""
        draw: npt.NDArray[np.float64] = np.random.default_rng([SEED, self.round, number]).random(length)
        return draw < self.chance

    def set(self, inputs: Any, logits: torch.Tensor) -> None:
        """logits: [S, V], of the first S segments of a pass of the draft model; changed in place."""
        self._live = [each for each in self._live if not each[0].finish_reason]
        by_pages = {id(request.page_ids): (ids, right) for request, ids, right in self._live}
        forced: list[tuple[int, int]] = []
        forbidden: list[tuple[int, int]] = []
        for row, segment in enumerate(inputs.segments[: logits.shape[0]]):
            ids, right = by_pages.get(id(segment.page_ids), ((), ()))
            if segment.kv_len < len(ids):
                (forced if right[segment.kv_len] else forbidden).append((row, int(ids[segment.kv_len])))
        for places, value in ((forced, 1e9), (forbidden, -torch.inf)):
            if places:
                rows, tokens = torch.tensor(places).T
                logits[rows, tokens] = value


class DialledModel(Model):
    """A loaded draft model whose logits a dial changes."""

    dial: Dial | None = None

    @classmethod
    def of(cls, model: Model) -> Self:
        dialled = object.__new__(cls)
        dialled.__dict__.update(model.__dict__)
        return dialled

    @torch.inference_mode()
    def forward(self) -> torch.Tensor:
        """[S, V]"""
        logits = super().forward()
        if self.dial is not None:
            self.dial.set(self.inputs, logits)
        return logits


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


class Pair:
    """A tiny target, its recorded texts, and a tiny draft model with a dial."""

    def __init__(self, num_texts: int, text: int = TEXT) -> None:
        torch.set_num_threads(1)  # matrices so small are not worth a second one
        target = random_llama("dialled-target", SEED, 8.0, **TINY)
        other = random_llama("dialled-draft", SEED + 1, 8.0, **TINY)
        config = ShardConfig(
            "target", str(target), "unix:/dev/null", dtype="float32", max_total_tokens=2048, max_running=AT_ONCE,
            cpu_memory=2**29, prefix_caching=False, speculation_max_batch_size=AT_ONCE,
        )  # fmt: skip
        draft = ShardConfig("draft", str(other), "unix:/dev/null", dtype="float32")
        self.draft = DialledModel.of(load_model(draft))
        self._harness = Harness(config, load_model(config), self.draft)
        self._text = text
        choice = np.random.default_rng(SEED)
        self._prompts = choice.integers(1, TINY["vocab_size"], (num_texts, PROMPT)).tolist()
        runs = self._harness.run([Wanted(prompt, text) for prompt in self._prompts])
        self.recorded = [[*run.wanted.prompt_ids, *run.token_ids] for run in runs]

    def run(self, chance: float, width: int, num_texts: int, round: int) -> list[Run]:
        """So many texts, the recorded ones over and over, with a draft that is right in other places each time."""
        how = Speculation(Method.DRAFT, width, schedule=Schedule.CONSTANT)
        dial = self.draft.dial = Dial(chance, self.recorded, round)
        wanted = [Wanted(self._prompts[i % len(self._prompts)], self._text, how) for i in range(num_texts)]
        runs = self._harness.run(wanted, dial.began)
        self.draft.dial = None
        for number, run in enumerate(runs):
            if [*run.wanted.prompt_ids, *run.token_ids] != self.recorded[number % len(self.recorded)]:
                raise RuntimeError(f"text {number} is not what was written without guessing")
        return runs


def tally(runs: Sequence[Run], width: int) -> dict[str, int]:
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
