"""Whether verifying a tree of guesses would pay where a chain is verified now: by replay, and by what steps of several
tokens cost.

The heads' several best tokens at each depth make a tree; one step verifies all of its nodes and keeps the longest path
that the target agrees with (Cai et al. 2024). Nodes are chosen greedily by how often their path would be right, on
half of the texts, and counted on the other half. No code serves trees.

    python -m benchmarks.tree [--quick]
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks import guessing
from benchmarks.guessing import KINDS, Kind
from benchmarks.replay import Text

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
MOST_RANK = 10
"""Candidates of each head."""
TURNS = 30
KV_LEN = 160
KINDS_OF_TEXT = (KINDS["code"], KINDS["citation"])

Path = tuple[int, ...]
"""A node: at each depth which of a head's candidates leads to it, 0 the best."""
Ranks = Sequence[Sequence[int]]
"""Of one text: by output i and head h where the output i + 1 + h stands among the head's candidates, -1 not at all."""


def chain(nodes: int) -> frozenset[Path]:
    """Each head's best alone."""
    return frozenset((0,) * depth for depth in range(1, nodes + 1))


def tree(texts: Sequence[Ranks], nodes: int) -> frozenset[Path]:
    """The nodes that are right most often, each with its way from the root."""
    found: set[Path] = set()
    while len(found) < nodes:
        counts: dict[Path, int] = {}
        for ranks in texts:
            for row in ranks:
                path = _follow(row, found)
                if len(path) < len(row) and row[len(path)] >= 0:
                    after = (*path, row[len(path)])
                    counts[after] = counts.get(after, 0) + 1
        if not counts:
            break
        found.add(max(counts, key=lambda path: (counts[path], -len(path), path)))
    return frozenset(found)


def tokens_per_step(texts: Sequence[Ranks], nodes: frozenset[Path]) -> float:
    """τ of a tree, replayed: a step gives the longest path that is right, and the target's own token."""
    tokens = steps = 0
    for ranks in texts:
        at = 0
        while at + 1 < len(ranks):
            at = min(at + len(_follow(ranks[at], nodes)) + 1, len(ranks) - 1)
            steps += 1
        tokens += max(0, len(ranks) - 1)
    return tokens / max(1, steps)


def _follow(row: Sequence[int], nodes: "frozenset[Path] | set[Path]") -> Path:
    """The longest right path of a tree at one row."""
    path: Path = ()
    while len(path) < len(row) and (after := (*path, row[len(path)])) in nodes:
        path = after
    return path


def ranks_of(kind: Kind, prompts: Sequence[str], most_tokens: int) -> list[Ranks]:
    """Where the texts' tokens stand among the heads' candidates; the target writes the texts greedily."""
    from benchmarks import forced  # torch

    ids = guessing.encode(prompts)
    written = forced.target(kind.adapter).write(ids, most_tokens)
    texts = [Text(tuple(p), tuple(o), most_tokens) for p, o in zip(ids, written, strict=True)]
    found: list[Ranks] = []
    for text, candidates in zip(texts, forced.candidates(kind, texts, MOST_RANK), strict=True):
        wanted = text.output_ids
        found.append(
            [
                [
                    head.index(wanted[i + 1 + h]) if i + 1 + h < len(wanted) and wanted[i + 1 + h] in head else -1
                    for h, head in enumerate(row)
                ]
                for i, row in enumerate(candidates)
            ]
        )
    return found


def costs(counts: Sequence[int], turns: int = TURNS) -> dict[int, float]:
    """v: seconds of a step of so many tokens, from each of which three heads guess, over a plain one of one token; one
    request to the random 200 M Llama in bfloat16.
    """
    import torch

    from benchmarks import heads_cost
    from lorikeet.shard.batch.inputs import HeadsRow, Segment

    model = heads_cost.loaded(heads_cost.Size())
    pages = range(-(-(KV_LEN + max(counts)) // model.page_size))

    def step(count: int, has_heads: bool) -> float:
        start = time.perf_counter()
        rows = list(range(count))
        heads = [HeadsRow(row, 0, heads_cost.NUM_HEADS) for row in rows] if has_heads else []
        model.inputs.fill([Segment(KV_LEN, count, pages)], torch.full((count,), 300), torch.tensor(rows), rows, heads)
        model.forward().argmax(-1)
        return time.perf_counter() - start

    seconds: dict[int, list[float]] = {count: [] for count in counts}
    plain = []
    with torch.inference_mode():
        for _ in range(turns):
            plain.append(step(1, has_heads=False))
            for count, values in seconds.items():
                values.append(step(count, has_heads=True))
    return {count: median(values) / median(plain) for count, values in seconds.items()}


@dataclass(frozen=True)
class Row:
    """A number of nodes, and what a step with so many gives."""

    nodes: int
    chain: float
    tree: float

    def speeds(self, v: Mapping[int, float]) -> tuple[float, float]:
        """Times faster than without guessing, by chain and by tree; a chain has no more nodes than there are heads."""
        return self.chain / v[self.nodes + 1], self.tree / v[self.nodes + 1]


def rows(texts: Sequence[Ranks], num_heads: int) -> list[Row]:
    """Chosen on the even texts, counted on the odd ones."""
    chosen, counted = texts[::2], texts[1::2]
    return [
        Row(n, tokens_per_step(counted, chain(min(n, num_heads))), tokens_per_step(counted, tree(chosen, n)))
        for n in NODES
    ]


def main() -> None:
    is_quick = "--quick" in sys.argv
    v = costs([n + 1 for n in NODES], 3 if is_quick else TURNS)
    told: dict[str, Any] = {"v": v}
    for kind in KINDS_OF_TEXT:
        texts = ranks_of(kind, guessing.prompts(kind.name, 8 if is_quick else 80), 96)
        found = rows(texts, len(texts[0][0]))
        print(f"\n{kind.name}: tokens per step and times faster\n")
        print("| nodes | v(nodes + 1) | chain | tree | chain, times | tree, times |\n|---|---|---|---|---|---|")
        for row in found:
            by_chain, by_tree = row.speeds(v)
            print(
                f"| {row.nodes} | {v[row.nodes + 1]:.3f} | {row.chain:.3f} | {row.tree:.3f} "
                f"| {by_chain:.3f} | {by_tree:.3f} |"
            )
        told[kind.name] = [[row.nodes, row.chain, row.tree, *row.speeds(v)] for row in found]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
