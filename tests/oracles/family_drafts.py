"""The drafts of the embedded model's heads and draft model along given texts, by plain transformers and PEFT.

One pass over a finished text gives every draft, which `tests.oracles.replay` turns into counts. Where two drafts are
nearly equally likely, arithmetic in another order may choose the other one; such texts are marked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from lorikeet.adapters.formats import heads as heads_format
from lorikeet.adapters.formats.heads import MedusaHeads
from lorikeet.adapters.medusa.target import DevicePlacement, Target
from lorikeet.adapters.medusa.texts import Text as WrittenText
from lorikeet.adapters.medusa.texts import batches, written_rows
from tests.oracles.family import BASE, DRAFT, DRAFTING, FAMILY, LOOKUP, Kind
from tests.oracles.replay import Chain, LongestSuffix, Rule, Table, Text, coupled_chance, rejection_chance

TIE = 1e-4
"""Distance of two logits below which either may be the higher one."""
CPU = DevicePlacement(torch.device("cpu"), torch.float32)


@dataclass(frozen=True)
class Forced:
    """The drafts for one text."""

    rule: Rule
    is_tied: bool
    """Whether one of them might as well be another."""


@cache
def target(adapter: str | None) -> Target:
    return Target(str(BASE), str(FAMILY / adapter) if adapter else None, CPU)


@cache
def heads(name: str) -> MedusaHeads:
    return MedusaHeads.of(heads_format.read(FAMILY / name, print))


@cache
def draft_model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32).eval()


def rules(method: str, kinds: Sequence[Kind], texts: Sequence[Text]) -> list[Forced]:
    """The drafts of a method along each text."""
    if method == LOOKUP:
        return [Forced(LongestSuffix(), False)] * len(texts)
    if method == DRAFTING:
        return draft(texts)
    found: dict[int, Forced] = {}
    for kind in dict.fromkeys(kinds):
        places = [place for place, each in enumerate(kinds) if each == kind]
        found |= zip(places, medusa(kind, [texts[place] for place in places]), strict=True)
    return [found[place] for place in range(len(texts))]


def medusa(kind: Kind, texts: Sequence[Text]) -> list[Forced]:
    """The drafts of a kind's heads."""
    return [
        Forced(Table(best.indices[..., 0].tolist()), bool((best.values[..., 0] - best.values[..., 1] < TIE).any()))
        for best in _best_of_heads(kind, texts, 2)
    ]


def candidates(kind: Kind, texts: Sequence[Text], count: int) -> list[list[list[list[int]]]]:
    """Per text, output and head so many of the likeliest tokens, the best one first."""
    return [best.indices.tolist() for best in _best_of_heads(kind, texts, count)]


@torch.no_grad()
def _best_of_heads(kind: Kind, texts: Sequence[Text], count: int) -> list[torch.return_types.topk]:
    """Per text [outputs, heads, count]: what the heads of a kind find likeliest."""
    from_heads, whose = heads(kind.heads or kind.adapter or ""), target(kind.adapter)
    found: dict[int, torch.return_types.topk] = {}
    written = [WrittenText(text.prompt_ids, text.output_ids) for text in texts]
    for batch in batches(written):
        for number, rows in zip(batch, written_rows(whose, [written[i] for i in batch]), strict=True):
            found[number] = from_heads.logits(rows, whose.logits)[..., : whose.vocab_size].topk(count)
    return [found[number] for number in range(len(texts))]


@torch.no_grad()
def draft(texts: Sequence[Text]) -> list[Forced]:
    """The greedy drafts of the draft model."""
    found = []
    for text in texts:
        best = _logits(draft_model(), text).topk(2)
        found.append(
            Forced(Chain(best.indices[:, 0].tolist()), bool((best.values[:, 0] - best.values[:, 1] < TIE).any()))
        )
    return found


@dataclass(frozen=True)
class Distribution:
    """How tokens are drawn."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def of(self, logits: torch.Tensor) -> torch.Tensor:
        """[N, V] logits → [N, V] probabilities, in float64."""
        scores = logits.double() / self.temperature
        if self.top_k:
            scores = scores.masked_fill(scores < scores.topk(self.top_k).values[:, -1:], -torch.inf)
        p = scores.softmax(-1)
        if self.top_p < 1:
            ordered = p.sort(descending=True)
            beyond = ordered.values.cumsum(-1) - ordered.values >= self.top_p
            p = p.masked_fill(torch.zeros_like(beyond).scatter(1, ordered.indices, beyond), 0.0)
        return p / p.sum(-1, keepdim=True)


@torch.no_grad()
def chances(kind: Kind, texts: Sequence[Text], distribution: Distribution, verify: str) -> list[list[float]]:
    """For every output the probability that its draft, sampled as the target's tokens are, is accepted."""
    found = []
    whose: LlamaForCausalLM = target(kind.adapter).model
    for text in texts:
        p, q = (distribution.of(_logits(model, text)) for model in (whose, draft_model()))
        if verify == "rejection":
            rows = enumerate(text.output_ids)
            found.append([rejection_chance(float(p[i, token]), float(q[i, token])) for i, token in rows])
        else:
            distributions = zip(p.tolist(), q.tolist(), text.output_ids, strict=True)
            found.append([coupled_chance(own, its, token) for own, its, token in distributions])
    return found


def _logits(model: LlamaForCausalLM, text: Text) -> torch.Tensor:
    """[outputs, V]: those that each output was, or would have been, chosen by."""
    ids = torch.tensor([[*text.prompt_ids, *text.output_ids[:-1]]])
    logits: torch.Tensor = model(ids, use_cache=False).logits[0, len(text.prompt_ids) - 1 :]
    return logits.float()
