"""Speculative decoding changes no text: the embedded model over HTTP, with and without, token by token; and the
server's counts against the replay oracle's.

Every prompt goes with every method and width, alone and in a batch that mixes methods, widths, adapters, temperatures
and penalties. Where two tokens of heads or draft model are nearly equally likely, a count that differs is a tie.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvloop

from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load import servers
from tests.oracles import family
from tests.oracles.family import DRAFTING, KINDS, METHODS, DraftOptions, FamilyAnswer, TextRequest
from tests.oracles.replay import NOTHING, Text, replay

WIDTHS = (1, 3, 5, 10)
NUM_PROMPTS = 204
CLIENTS = 24
DISTRIBUTIONS: tuple[Mapping[str, Any], ...] = (
    {},
    {"do_sample": True, "temperature": 0.7, "seed": 11},
    {"ignore_eos_token": True},
    {"do_sample": True, "temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": 12, "ignore_eos_token": True},
    {"repetition_penalty": 1.3, "ignore_eos_token": True},
    {"do_sample": True, "temperature": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "seed": 13},
    {"do_sample": True, "watermark": True, "typical_p": 0.9, "seed": 14, "ignore_eos_token": True},
    {"stop": ["\n\n", " a"]},
)
COMBINATIONS = tuple((method, width) for method in METHODS for width in WIDTHS)


@dataclass(frozen=True)
class Size:
    """How much is asked."""

    prompts: int = NUM_PROMPTS
    widths: tuple[int, ...] = WIDTHS
    rotations: int = len(COMBINATIONS)


QUICK = Size(18, (3,), 2)


@dataclass(frozen=True)
class Plain:
    """A request and what was written without family."""

    asked: TextRequest
    answer: FamilyAnswer
    text: Text

    def is_countable(self, method: str) -> bool:
        """Whether the oracle knows the drafts: it knows the draft model's own distribution at temperature 0 only, and a
        stop string ends a text in the router.
        """
        distribution = {key for key in self.asked.distribution if key != "ignore_eos_token"}
        return not distribution if method == DRAFTING else "stop" not in distribution


def requests(count: int) -> list[TextRequest]:
    """Prompts of every kind with every kind of sampling, with lengths that no width divides."""
    kinds = list(KINDS.values())
    prompts = {kind.name: family.prompts(kind.name, -(-count // len(kinds))) for kind in kinds}
    return [
        TextRequest(
            prompts[kinds[i % len(kinds)].name][i // len(kinds)],
            kinds[i % len(kinds)],
            48 + i % 17,
            DISTRIBUTIONS[(i // len(kinds)) % len(DISTRIBUTIONS)],
        )
        for i in range(count)
    ]


def alone(method: str, size: Size | None = None) -> Cases:
    """One case per width: every request by itself."""
    size = size or Size()
    wanted = size.widths
    with _plain(size) as (port, plain):
        for width in wanted:
            asked = [(each.asked, DraftOptions(method, width)) for each in plain]
            answers = uvloop.run(family.ask_all(port, asked, 1))
            yield compared(f"{method} {width}", plain, answers, [(method, width)] * len(plain))


def mixed(size: Size | None = None) -> Cases:
    """One case per rotation: all requests at once, each with another method and width than its neighbours; over all
    rotations each comes with every one.
    """
    size = size or Size()
    wanted = range(size.rotations)
    with _plain(size) as (port, plain):
        for turn in wanted:
            hows = [how(place, turn) for place in range(len(plain))]
            asked = [(each.asked, DraftOptions(*how)) for each, how in zip(plain, hows, strict=True)]
            answers = uvloop.run(family.ask_all(port, asked, CLIENTS))
            yield compared(f"rotation {turn}", plain, answers, hows)


def how(place: int, turn: int) -> tuple[str, int]:
    """Method and width of a request: neighbours differ, and requests of one kind get all of them."""
    return COMBINATIONS[(place + place // len(COMBINATIONS) + turn) % len(COMBINATIONS)]


@contextmanager
def _plain(size: Size) -> Iterator[tuple[int, list[Plain]]]:
    """A server, and all texts without family."""
    asked = requests(size.prompts)
    ids = family.encode([each.prompt for each in asked])
    with servers.running("lossless", family.command()) as server:
        answers = uvloop.run(family.ask_all(server.port, [(each, None) for each in asked], CLIENTS))
        for each, known in zip(answers, ids, strict=True):
            if each.num_prompt != len(known):
                raise RuntimeError(f"the server made {each.num_prompt} tokens of a prompt of {len(known)}")
        texts = [t.as_text(known, each.max_new_tokens) for t, known, each in zip(answers, ids, asked, strict=True)]
        yield server.port, [Plain(*row) for row in zip(asked, answers, texts, strict=True)]


def compared(
    name: str, plain: Sequence[Plain], answers: Sequence[FamilyAnswer], hows: Sequence[tuple[str, int]]
) -> Case:
    """Texts, each answer's own sums, and the oracle's counts."""
    different, faults = [], []
    for number, (without, answer) in enumerate(zip(plain, answers, strict=True)):
        if (without.answer.token_ids, without.answer.text) != (answer.token_ids, answer.text):
            different.append(
                f"request {number} ({without.asked.kind.name}, {hows[number]}, {without.asked.distribution})"
            )
        faults += [f"request {number}: {fault}" for fault in answer.faults()]
    distances = [
        abs(a - b)
        for without, answer in zip(plain, answers, strict=True)
        for a, b in zip(without.answer.logprobs, answer.logprobs, strict=False)
        if math.isfinite(a) and math.isfinite(b)
    ]
    measured = sum((answer.counts for answer in answers), NOTHING)
    raw = {
        "requests": len(answers),
        "different": len(different),
        "faults": len(faults),
        "logprob_error": max(distances, default=0.0),
        "tokens": measured.tokens,
        "forwards": measured.forwards,
        "drafted": measured.drafted,
        "accepted": measured.accepted,
        **_counted(plain, answers, hows),
        "examples": [*different, *faults][:5],
    }
    idle = [how for how in dict.fromkeys(hows) if not _drafted(answers, hows, how)]
    return Case(name, raw, f"nothing was ever drafted by {idle}" if idle else "")


def _drafted(answers: Sequence[FamilyAnswer], hows: Sequence[tuple[str, int]], how: tuple[str, int]) -> float:
    return sum(answer.counts.drafted for answer, its in zip(answers, hows, strict=True) if its == how)


def _counted(
    plain: Sequence[Plain], answers: Sequence[FamilyAnswer], hows: Sequence[tuple[str, int]]
) -> dict[str, Any]:
    """How many answers' steps and drafts are the oracle's."""
    from tests.oracles import family_drafts  # torch

    miscounted, ties, num_counted = [], 0, 0
    for method in METHODS:
        places = [i for i, how in enumerate(hows) if how[0] == method and plain[i].is_countable(method)]
        rules = family_drafts.rules(method, [plain[i].asked.kind for i in places], [plain[i].text for i in places])
        for place, known in zip(places, rules, strict=True):
            wanted, found = replay(plain[place].text, known.rule, hows[place][1]), answers[place].counts
            num_counted += 1
            if wanted != found:
                ties += known.is_tied
                if not known.is_tied:
                    miscounted.append(f"request {place} {hows[place]}: {found} where {wanted} was due")
    return {"counted": num_counted, "miscounted": len(miscounted), "ties": ties, "miscounts": miscounted[:5]}


def num_wrong(raw: Raw) -> float:
    """Texts that differ, and answers whose own numbers do not add up."""
    return float(raw["different"] + raw["faults"])


def num_miscounted(raw: Raw) -> float:
    return float(raw["miscounted"])


def ties_beyond_allowed(raw: Raw) -> float:
    """More than one answer in a hundred."""
    return max(0.0, raw["ties"] - raw["counted"] / 100)
