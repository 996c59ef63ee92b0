"""Requests of the embedded model, its adapters, heads and draft model: how their server is started, what it is asked
and what it answers. Imports no torch.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.load import adapted, servers
from tests.oracles.replay import Counts, Text

FAMILY = servers.REPOSITORY / "demo"
BASE, DRAFT = FAMILY / "base", FAMILY / "draft"
LOOKUP, MEDUSA, DRAFTING = "lookup", "medusa", "draft"
STORE = servers.LOGS.parents[1] / ".models" / "family-store"
"""Folder of the family's adapters in the served layout."""
METHODS = (LOOKUP, MEDUSA, DRAFTING)
OFF: Mapping[str, Any] = {"speculative_method": "off"}


@dataclass(frozen=True)
class Kind:
    """A kind of text: the adapter that generates it, and the heads trained on it."""

    name: str
    adapter: str | None = None
    heads: str | None = None
    """Requested in addition to the adapter; None if the adapter has its own."""

    def parameters(self, method: str) -> dict[str, Any]:
        """The adapter and heads that a request of this kind names under a method."""
        asked: dict[str, Any] = {"adapter_id": self.adapter} if self.adapter else {}
        if method == MEDUSA and self.heads:
            asked |= {"heads_id": self.heads} if self.adapter else {"adapter_id": self.heads}
        return asked


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("code", None, "heads/base"),
        Kind("citation", "adapters/citation", "heads/citation"),
        Kind("record", "adapters/record", "heads/base"),
        Kind("query", "adapters/query", "heads/base"),
        Kind("joined", "heads/citation-joined"),
    )
}


def prompts(kind: str, count: int) -> list[str]:
    """Held-out prompts of a kind, the same ones always."""
    from lorikeet.demo.data import corpus
    from lorikeet.demo.data.pieces import pieces
    from lorikeet.demo.data.tasks import citation, query, record
    from lorikeet.demo.data.tasks.example import held_out_examples

    if kind == "code":
        return pieces(corpus.held_out_files(), count, seed=0)
    tasks = {"citation": citation, "joined": citation, "record": record, "query": query}
    return [example.prompt for example in held_out_examples(tasks[kind], count)]


@dataclass(frozen=True)
class TextRequest:
    """One request, without its options of speculative decoding."""

    prompt: str
    kind: Kind
    max_new_tokens: int = 64
    distribution: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DraftOptions:
    """A request's options of speculative decoding."""

    method: str
    width: int
    schedule: str = "constant"
    verify: str = ""

    def parameters(self) -> dict[str, Any]:
        asked: dict[str, Any] = {"speculative_method": self.method, "speculative_tokens": self.width}
        asked |= {"speculative_schedule": self.schedule} if self.schedule else {}
        return asked | ({"speculative_verify": self.verify} if self.verify else {})


@dataclass(frozen=True)
class FamilyAnswer:
    """An answer of the server."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_prompt: int
    skipped: int
    report: Mapping[str, Any]
    """`details.speculation`, empty where there is none."""

    @property
    def counts(self) -> Counts:
        num_tokens = len(self.token_ids)
        steps, drafted = self.report.get("steps", num_tokens), self.report.get("drafted", 0)
        return Counts(num_tokens, steps, drafted, self.report.get("accepted", 0), 1)

    def as_text(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Text:
        return Text(tuple(prompt_ids), self.token_ids, max_new_tokens)

    def faults(self) -> list[str]:
        """Contradictions among the answer's own numbers."""
        if not self.report:
            return []
        num_tokens, report = len(self.token_ids), self.report
        found = []
        if sum(report["sources"].values()) != num_tokens:
            found.append(f"sources {report['sources']} of {num_tokens} tokens")
        if report["steps"] + self.skipped != num_tokens:
            found.append(f"{report['steps']} steps and {self.skipped} skipped of {num_tokens} tokens")
        if report["accepted"] != sum(report["sources"].get(name, 0) for name in (*METHODS, "history")):
            found.append(f"{report['accepted']} accepted with {report['sources']}")
        if report["accepted"] > report["drafted"]:
            found.append(f"{report['accepted']} accepted of {report['drafted']}")
        return found


def command(*flags: str, model: Path = BASE, draft: Path | None = DRAFT) -> servers.Command:
    """Our server with the embedded model in float32, with every draft source."""
    own = ("--default-adapter-source", "local", "--local-adapter-root", str(FAMILY), "--adapter-store", str(STORE))
    drafting = ("--draft-model-id", str(draft), "--draft-dtype", "float32") if draft else ()
    room = ("--cpu-memory", "512MiB", "--adapter-memory-fraction", "0.5", "--speculation-max-batch-size", "64")
    return servers.lorikeet(model, "--dtype", "float32", *own, *drafting, *room, *flags)


async def ask(port: int, asked: TextRequest, options: DraftOptions | None) -> FamilyAnswer:
    """One answer with details. Raises RuntimeError if the server rejects the request."""
    how = OFF if options is None else options.parameters()
    method = "off" if options is None else options.method
    parameters = {**asked.kind.parameters(method), **asked.distribution, **how, "details": True}
    body = {"inputs": asked.prompt, "parameters": {"max_new_tokens": asked.max_new_tokens, **parameters}}
    reply = await adapted.send(port, "/generate", body)
    if reply.status != 200:
        raise RuntimeError(f"{parameters}: {reply.status} {reply.body[:300]!r}")
    details = reply.json["details"]
    return FamilyAnswer(
        reply.json["generated_text"],
        tuple(token["id"] for token in details["tokens"]),
        tuple(token["logprob"] for token in details["tokens"]),
        details["prompt_tokens"],
        details["skipped_tokens"],
        details.get("speculation") or {},
    )


async def ask_all(
    port: int, requests: Sequence[tuple[TextRequest, DraftOptions | None]], clients: int, most_s: float = 540.0
) -> list[FamilyAnswer]:
    """Answers in the order of the requests, `clients` of which run at a time."""
    answers: list[FamilyAnswer | None] = [None] * len(requests)
    waiting = itertools.count()

    async def client() -> None:
        for number in waiting:
            if number >= len(requests):
                return
            answers[number] = await ask(port, *requests[number])

    async with asyncio.timeout(most_s), asyncio.TaskGroup() as group:
        for _ in range(min(clients, len(requests))):
            group.create_task(client())
    return [each for each in answers if each is not None]


def encode(texts: Sequence[str]) -> list[list[int]]:
    """Token ids of prompts as the server makes them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
