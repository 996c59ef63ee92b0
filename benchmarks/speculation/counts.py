"""Tokens per step of speculative decoding with the embedded model over HTTP, from the server's own counters, with the
counts of the replay oracle for the same texts. One case per combination of method and width.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvloop

from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load import servers
from tests.oracles import family
from tests.oracles.family import DRAFTING, KINDS, LOOKUP, MEDUSA, DraftOptions, FamilyAnswer, Kind, TextRequest
from tests.oracles.replay import NOTHING, Counts, Text, expected, lorax, replay, share_repeated

WIDTHS = tuple(range(1, 11))
SWEEP = tuple(range(1, 9))
LOOKUP_WIDTHS = (3, 10)
COPIED = "citation"
"""The corpus whose answers are in their prompts."""
UNCOPIED = ("record", "query", "value", "code")
CODE = KINDS["code"]
GENERAL = Kind("citation with general heads", "adapters/citation", "heads/base")
WITH_HEADS = (CODE, KINDS["record"], GENERAL, KINDS["citation"], KINDS["joined"])
NUM_HEADS_KINDS, NUM_UNCOPIED = len(WITH_HEADS), len(UNCOPIED) * len(LOOKUP_WIDTHS)
SAMPLED = tuple((verify, width) for verify in ("shared-noise", "rejection") for width in (1, 4, 8))
NUM_SAMPLED = len(SAMPLED)
LLMSS_SAMPLING: Mapping[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 0.9}
CHAT_SAMPLING: Mapping[str, Any] = {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "top_k": 40}
PLAIN_SAMPLING: Mapping[str, Any] = {"do_sample": True, "temperature": 0.8}


@dataclass(frozen=True)
class CountsSize:
    """How many prompts and tokens."""

    prompts: int = 24
    tokens: int = 256
    corpus: int = 60
    widths: tuple[int, ...] = WIDTHS
    sweep: tuple[int, ...] = SWEEP


QUICK = CountsSize(4, 64, 6, (1, 4), (2, 4))


@dataclass(frozen=True)
class Corpus:
    """Requests of one kind with one kind of sampling."""

    kind: Kind
    count: int
    tokens: int
    distribution: Mapping[str, Any] = field(default_factory=dict)

    def asked(self, *, is_seeded: bool) -> list[TextRequest]:
        fields = {"ignore_eos_token": True} if self.kind == CODE else {}
        seeds = [{"seed": 100 + i} if is_seeded and self.distribution else {} for i in range(self.count)]
        prompts = family.prompts(self.kind.name.split()[0], self.count)
        return [
            TextRequest(p, self.kind, self.tokens, {**fields, **self.distribution, **seed})
            for p, seed in zip(prompts, seeds, strict=True)
        ]


def run(name: str, port: int, corpus: Corpus, how: DraftOptions | None, clients: int = 1) -> Case:
    """A corpus with one method: the server's counts, and the oracle's of the same texts."""
    verify = (how.verify or "shared-noise") if how else ""
    requests = corpus.asked(is_seeded=verify != "rejection")
    start = time.monotonic()
    answers = uvloop.run(family.ask_all(port, [(request, how) for request in requests], clients))
    seconds = time.monotonic() - start
    ids = family.encode([request.prompt for request in requests])
    texts = [t.as_text(known, a.max_new_tokens) for t, known, a in zip(answers, ids, requests, strict=True)]
    raw = {
        **as_raw(sum((answer.counts for answer in answers), NOTHING)),
        "width": how.width if how else 0,
        "seconds": seconds,
        "repeated": sum(share_repeated(text) * len(text.output_ids) for text in texts)
        / max(1, sum(len(text.output_ids) for text in texts)),
        **{
            f"{phase}_seconds": sum(answer.report.get(f"{phase}_seconds", 0.0) for answer in answers)
            for phase in ("draft", "verify", "accept")
        },
        **_oracle(corpus, how, texts, answers),
    }
    faults = [fault for answer in answers for fault in answer.faults()]
    faults += [f"verified by {rule}" for rule in {answer.report.get("verify") for answer in answers} - {verify or None}]
    return Case(name, raw, "; ".join(faults[:3]) if how else "")


def as_raw(counts: Counts) -> dict[str, float]:
    names = ("tokens", "forwards", "drafted", "accepted", "texts", "variance")
    return {name: getattr(counts, name) for name in names}


def counts_of(raw: Raw) -> Counts:
    return Counts(**{name: raw[name] for name in as_raw(NOTHING)})


def _oracle(
    corpus: Corpus, how: DraftOptions | None, texts: Sequence[Text], answers: Sequence[FamilyAnswer]
) -> dict[str, Any]:
    """The oracle's counts of the same texts, and how many answers have others."""
    if how is None:
        return {}
    from tests.oracles import family_drafts  # torch

    kind = corpus.kind
    if how.method == DRAFTING and corpus.distribution:
        distribution = family_drafts.Distribution(
            **{key: value for key, value in corpus.distribution.items() if key != "do_sample"}
        )
        distributions = family_drafts.chances(kind, texts, distribution, how.verify)
        counted = [expected(text, chances, how.width) for text, chances in zip(texts, distributions, strict=True)]
        return {"oracle": as_raw(sum(counted, NOTHING))}
    rules = family_drafts.rules(how.method, [kind] * len(texts), texts)
    counted = [replay(text, rule.rule, how.width) for text, rule in zip(texts, rules, strict=True)]
    rows = list(zip(answers, counted, rules, strict=True))
    raw = {
        "oracle": as_raw(sum(counted, NOTHING)),
        "miscounted": sum(
            answer.counts != expected_counts and not rule.is_tied for answer, expected_counts, rule in rows
        ),
        "ties": sum(answer.counts != expected_counts and rule.is_tied for answer, expected_counts, rule in rows),
    }
    if how.method == LOOKUP:
        unbounded = (replay(text, lorax, how.width, is_bounded=False) for text in texts)
        raw["lorax"] = as_raw(sum(unbounded, NOTHING))
    return raw


@contextmanager
def _server(**values: Any) -> Iterator[int]:
    with servers.running("tables", family.command(**values)) as server:
        yield server.port


def gamma(size: CountsSize | None = None) -> Cases:
    """LMFlow's table with our models: without speculation, then with 1, 2, … drafts, greedy, one request at a time."""
    size = size or CountsSize()
    corpus = Corpus(CODE, size.prompts, size.tokens)
    with _server() as port:
        run("warm up", port, Corpus(CODE, 2, 16), DraftOptions(DRAFTING, 3))
        for width in (0, *size.widths):
            yield run(f"width {width}", port, corpus, DraftOptions(DRAFTING, width) if width else None)


def three_rows(size: CountsSize | None = None) -> Cases:
    """LLMSpeculativeSampling's rows: only the draft model, only the target, and both with a sweep of widths; sampled
    as there.
    """
    size = size or CountsSize()
    corpus = Corpus(CODE, size.prompts, 100, LLMSS_SAMPLING)
    with _server(model=family.DRAFT, draft=None) as port:
        run("warm up", port, Corpus(CODE, 2, 16), None)
        yield run("draft alone", port, corpus, None)
    with _server() as port:
        run("warm up", port, Corpus(CODE, 2, 16), DraftOptions(DRAFTING, 3))
        yield run("target alone", port, corpus, None)
        for width in size.sweep:
            yield run(f"width {width}", port, corpus, DraftOptions(DRAFTING, width, verify="rejection"))


def chat(size: CountsSize | None = None) -> Cases:
    """Xinference's figures: accepted over drafted at four drafts, and seconds with and without."""
    size = size or CountsSize()
    corpus = Corpus(CODE, size.prompts, size.tokens, CHAT_SAMPLING)
    with _server() as port:
        run("warm up", port, Corpus(CODE, 2, 16), DraftOptions(DRAFTING, 3))
        for name, how in (("off", None), ("width 4", DraftOptions(DRAFTING, 4, verify="rejection"))):
            yield run(name, port, corpus, how)


def sampled(size: CountsSize | None = None) -> Cases:
    """The draft model with both verification rules at a temperature: counts and their expectations."""
    size = size or CountsSize()
    corpus = Corpus(CODE, 2 * size.prompts, size.tokens // 2, PLAIN_SAMPLING)
    with _server() as port:
        for verify, width in SAMPLED:
            yield run(f"{verify} {width}", port, corpus, DraftOptions(DRAFTING, width, verify=verify), 8)


def copied(size: CountsSize | None = None) -> Cases:
    """Prompt lookup on texts that are copied from their prompts, and LoRAX's rule on the same texts."""
    return _lookup((COPIED,), size or CountsSize())


def uncopied(size: CountsSize | None = None) -> Cases:
    """Prompt lookup on the other kinds of text, and LoRAX's rule on the same texts."""
    return _lookup(UNCOPIED, size or CountsSize())


def _lookup(kinds: Sequence[str], size: CountsSize) -> Cases:
    with _server(draft=None) as port:
        for kind in kinds:
            for width in LOOKUP_WIDTHS:
                corpus = Corpus(KINDS[kind], size.corpus, 96)
                yield run(f"{kind} {width}", port, corpus, DraftOptions(LOOKUP, width), 8)


def medusa(size: CountsSize | None = None) -> Cases:
    """Chains of Medusa heads: general ones on code and adapters' texts, and those of the citation adapter."""
    size = size or CountsSize()
    with _server(draft=None) as port:
        for kind in WITH_HEADS:
            yield run(kind.name, port, Corpus(kind, size.corpus, 96), DraftOptions(MEDUSA, 3), 8)


def tau(raw: Raw) -> float:
    return counts_of(raw).tokens_per_step


def oracle(raw: Raw) -> Counts:
    return counts_of(raw["oracle"])


def num_miscounted(raw: Raw) -> float:
    return float(raw.get("miscounted", 0))


def distance(raw: Raw) -> float:
    """Steps from the expected ones, in standard errors."""
    expected_counts = oracle(raw)
    return abs(counts_of(raw).forwards - expected_counts.forwards) / max(1e-9, expected_counts.variance) ** 0.5


def over_lorax(raw: Raw) -> float:
    """Tokens per step over those that LoRAX's rule gives with the same number of drafts."""
    return tau(raw) / counts_of(raw["lorax"]).tokens_per_step


def rows_over_lorax(raw: Raw) -> float:
    return float(raw["drafted"] / raw["lorax"]["drafted"])


def speed(raw: Raw) -> float:
    """Tokens per second, prompts included."""
    return float(raw["tokens"] / raw["seconds"])
