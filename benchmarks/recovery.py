"""Shards are killed and halted at random moments under a mixed load: every answer must be what it is undisturbed.

Two replicas of the embedded base with its draft model and adapters; streams of sixteen kinds: base and three adapters,
no guesses, lookup, draft model and heads, greedy and sampled, with log probabilities. A gap is the longest silence of
any stream around a harm, the wait for its first token included.

    python -m benchmarks.recovery [HARMS] [stop | roll]
"""

import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.case import Case, Cases, Raw
from lorikeet.launcher.cli.client import Client, ServerError

DRAFT = "demo/draft"
KILLS, STOPS, ROLLS = 100, 20, 10
HARMS = 10
"""Of a case."""
CLIENTS = 8
NUM_TOKENS = (40, 200)
PAUSE_S = (0.5, 2.0)
"""After all is well again, before the next harm."""
BACK_S = 120.0
SETTLE_S = 4.0
"""So long after a harm silences count as its own."""
SEED = 77
FLAGS = (
    "--draft-model-id", DRAFT, "--replicas", "2", "--threads", "1", "--cpu-memory", "512MiB",
    "--speculative-tokens", "4",
)  # fmt: skip
SETTINGS: dict[str, Any] = {
    "harms_per_case": HARMS,
    "clients": CLIENTS,
    "replicas": 2,
    "new_tokens": NUM_TOKENS,
    "pause_s": PAUSE_S,
    "seed": SEED,
}


@dataclass(frozen=True)
class Kind:
    """One request that is asked again and again."""

    prompt: str
    parameters: dict[str, Any]


def kinds() -> list[Kind]:
    """Four methods, greedy and sampled, with and without an adapter."""
    draw = random.Random(SEED)
    found = []
    prompts = ("def add(a, b):\n", "class A:\n    def __init__(self):\n", "import os\n\n", "for i in range(3):\n")
    for number, method in enumerate(("off", "lookup", "draft", "medusa") * 4):
        parameters: dict[str, Any] = {
            "max_new_tokens": draw.randint(*NUM_TOKENS),
            "ignore_eos_token": True,
            "speculative_method": method,
            "speculative_schedule": "constant",
            "adapter_id": (None, "json", "sql", "cite")[number // 4],
        }
        if method == "off":
            parameters |= {"speculative_tokens": 0, "speculative_schedule": None}
        if method == "medusa":
            parameters["heads_id"] = "heads"
        if number % 2:
            parameters |= {"do_sample": True, "seed": number, "temperature": 0.8, "top_p": 0.95}
        kept = {name: value for name, value in parameters.items() if value is not None}
        found.append(Kind(prompts[number % 4] * (1 + number % 3), kept))
    return found


Said = tuple[str, tuple[tuple[int, str, float | None], ...]]
"""Text, and each token's id, text and log probability."""


@dataclass
class Answer:
    """One stream as it came. Moments are of time.monotonic()."""

    kind: int
    moments: list[float]
    said: Said | None = None
    error: str = ""
    unsound: str = ""
    """What of its counts does not add up."""


def ask(client: Client, index: int, kind: Kind) -> Answer:
    """Read one stream to its end."""
    answer = Answer(index, [time.monotonic()])
    tokens: list[tuple[int, str, float | None]] = []
    try:
        with client.stream(kind.prompt, **kind.parameters) as stream:
            for token in stream:
                answer.moments.append(time.monotonic())
                tokens.append((token.id, token.text, token.logprob))
        answer.said = (stream.text or "", tuple(tokens))
        answer.unsound = unsound(stream.details, len(tokens))
    except (ServerError, OSError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


def unsound(details: dict[str, Any], num_tokens: int) -> str:
    """Which count of an answer does not agree with its tokens."""
    if details["generated_tokens"] != num_tokens:
        return "generated_tokens"
    report = details.get("speculation")
    if report is None:
        return ""
    if sum(report["sources"].values()) != num_tokens:
        return "sources"
    return "" if report["accepted"] <= report["drafted"] else "accepted"


@dataclass
class Load:
    """Clients that ask one thing after another."""

    client: Client
    kinds: list[Kind]
    answers: list[Answer] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self, seed: int) -> Iterator[None]:
        threads = [threading.Thread(target=self._ask, args=(random.Random(seed + n),)) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _ask(self, draw: random.Random) -> None:
        while not self._over.is_set():
            index = draw.randrange(len(self.kinds))
            self.answers.append(ask(self.client, index, self.kinds[index]))


class Fleet:
    """The processes of a running server, by its log."""

    def __init__(self, server: servers.Server) -> None:
        self._server = server

    def pid(self, index: int) -> int:
        """The shard of that number. Raises LookupError while there is none."""
        for pid in servers.group(self._server.process.pid):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"lorikeet.shard" in words and any(word.endswith(b"/shard-%d.json" % index) for word in words):
                return pid
        raise LookupError(f"shard {index} does not run")

    def replace_all(self) -> None:
        """What a rolling restart is, until it is over. Raises TimeoutError."""
        num_before = self._num_said("every process was replaced")
        os.kill(self._server.process.pid, signal.SIGUSR2)
        until = time.monotonic() + BACK_S
        while self._num_said("every process was replaced") == num_before:
            if time.monotonic() > until or not self._server.alive():
                raise TimeoutError(f"not everything was replaced: {servers.tail(self._server.log)}")
            time.sleep(0.05)

    def _num_said(self, words: str) -> int:
        return self._server.log.read_text(errors="replace").count(words)

    def await_served(self, index: int) -> None:
        """That shard has answered a request since it was started. Raises TimeoutError."""
        found = re.search(r"unix:(\S+)/shard-\d\.sock", self._server.log.read_text(errors="replace"))
        assert found is not None
        mark = Path(found[1]) / f"shard-{index}.served"
        until = time.monotonic() + BACK_S
        while not mark.exists():
            if time.monotonic() > until or not self._server.alive():
                raise TimeoutError(f"shard {index} has not come back: {servers.tail(self._server.log)}")
            time.sleep(0.02)


def harmed(number: signal.Signals, num_harms: int, case: int) -> Case:
    """One server, so many harms, one after the other has healed. SIGUSR2 is a rolling restart of everything."""
    draw = random.Random(SEED + 1000 * case)
    asked = kinds()
    harms: list[dict[str, Any]] = []
    error = ""
    with servers.running("recovery", servers.lorikeet(None, *FLAGS)) as server:
        client, fleet = Client(f"http://127.0.0.1:{server.port}", timeout_s=BACK_S), Fleet(server)
        undisturbed = [ask(client, index, kind) for index, kind in enumerate(asked)]
        load = Load(client, asked)
        with load.running(SEED + 31 * case):
            try:
                for _ in range(num_harms):
                    for index in range(2):
                        fleet.await_served(index)
                    time.sleep(draw.uniform(*PAUSE_S))
                    index = draw.randrange(2)
                    harms.append({"shard": index, "at": time.monotonic()})
                    if number is signal.SIGUSR2:
                        fleet.replace_all()
                    else:
                        os.kill(fleet.pid(index), number)
                        time.sleep(SETTLE_S)
            except (TimeoutError, LookupError) as failure:
                error = str(failure)
    wrong = [
        answer.error or answer.unsound or f"another text of kind {answer.kind}"
        for answer in (*undisturbed, *load.answers)
        if answer.error or answer.unsound or answer.said != undisturbed[answer.kind].said
    ]
    for harm in harms:
        harm["gap_s"] = round(gap(load.answers, harm["at"]), 3)
        del harm["at"]
    return Case(f"harms {case}", {"answers": len(load.answers), "wrong": wrong, "harms": harms}, error)


def gap(answers: list[Answer], at: float) -> float:
    """The longest silence of a stream that began, or lasted, between a harm and its end."""
    silences = [
        later - earlier
        for answer in answers
        for earlier, later in zip(answer.moments, answer.moments[1:], strict=False)
        if later >= at and earlier <= at + SETTLE_S
    ]
    return max(silences, default=0.0)


def measure(number: signal.Signals, num_harms: int, finished: frozenset[str] = frozenset()) -> Cases:
    """One case, with a server of its own, per ten harms."""
    for case in range(num_harms // HARMS):
        if f"harms {case}" not in finished:
            yield harmed(number, HARMS, case)


kills = partial(measure, signal.SIGKILL, KILLS)
stops = partial(measure, signal.SIGSTOP, STOPS)
rolls = partial(measure, signal.SIGUSR2, ROLLS)


def num_wrong(raw: Raw) -> float:
    """Answers that failed or were not what they are undisturbed."""
    return float(len(raw["wrong"]))


def longest_gap(raw: Raw) -> float:
    return max(float(harm["gap_s"]) for harm in raw["harms"])


def main() -> None:
    words = {"stop": signal.SIGSTOP, "roll": signal.SIGUSR2}
    number = next((words[word] for word in sys.argv[1:] if word in words), signal.SIGKILL)
    case = harmed(number, int(sys.argv[1]) if sys.argv[1:] else HARMS, 0)
    for harm in case.raw["harms"]:
        print(harm)
    print(case.raw["answers"], "answers, wrong:", case.raw["wrong"][:20], case.error)


if __name__ == "__main__":
    main()
