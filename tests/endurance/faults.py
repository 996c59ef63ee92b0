"""Shards that are killed, stopped or replaced at random moments under a mixed load: every answer must be what it is
without a fault.

Two replicas of the embedded model with its draft model and adapters; streams of sixteen kinds: base and three adapters,
no speculation, lookup, draft model and heads, greedy and sampled, with log probabilities. A gap is the longest pause of
any stream around a fault, the time to first token included.
"""

import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.evidence.figure import Case, Raw
from benchmarks.load import servers
from lorikeet.launcher.cli.client import Client, ServerError

DRAFT = "demo/draft"
KILLS, STOPS, ROLLS = 100, 20, 10
FAULTS_PER_CASE = 10
CLIENTS = 8
NUM_TOKENS = (40, 200)
PAUSE_S = (0.5, 2.0)
"""After recovery, before the next fault."""
BACK_S = 120.0
SETTLE_S = 4.0
"""How long after a fault pauses count as its own."""
SEED = 77
FLAGS = (
    "--draft-model-id", DRAFT, "--replicas", "2", "--threads", "1", "--cpu-memory", "512MiB",
    "--speculative-tokens", "4",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """One request that is sent repeatedly."""

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


Output = tuple[str, tuple[tuple[int, str, float | None], ...]]
"""Text, and each token's id, text and log probability."""


@dataclass
class Answer:
    """One stream as it came. Moments are of time.monotonic()."""

    kind: int
    moments: list[float]
    output: Output | None = None
    error: str = ""
    unsound: str = ""
    """The count that contradicts the tokens."""


def ask(client: Client, index: int, kind: Kind) -> Answer:
    """Read one stream."""
    answer = Answer(index, [time.monotonic()])
    tokens: list[tuple[int, str, float | None]] = []
    try:
        with client.stream(kind.prompt, **kind.parameters) as stream:
            for token in stream:
                answer.moments.append(time.monotonic())
                tokens.append((token.id, token.text, token.logprob))
        answer.output = (stream.text or "", tuple(tokens))
        answer.unsound = unsound(stream.details, len(tokens))
    except (ServerError, OSError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


def unsound(details: dict[str, Any], num_tokens: int) -> str:
    """The count of an answer that contradicts its tokens."""
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
    """Clients that send one request after another."""

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

    def __init__(self, server: servers.RunningServer) -> None:
        self._server = server

    def pid(self, index: int) -> int:
        """The shard of that number. Raises LookupError while there is none."""
        for pid in servers.group(self._server.process.pid):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"lorikeet.shard" in words and any(word.endswith(b"/shard-%d.json" % index) for word in words):
                return pid
        raise LookupError(f"shard {index} does not run")

    def replace_all(self) -> None:
        """Do a rolling restart. Raises TimeoutError."""
        num_before = self._num_logged("every process was replaced")
        os.kill(self._server.process.pid, signal.SIGUSR2)
        until = time.monotonic() + BACK_S
        while self._num_logged("every process was replaced") == num_before:
            if time.monotonic() > until or not self._server.alive():
                raise TimeoutError(f"not everything was replaced: {servers.tail(self._server.log)}")
            time.sleep(0.05)

    def _num_logged(self, words: str) -> int:
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


def run_with_faults(number: signal.Signals, num_faults: int, case: int) -> Case:
    """One server and `num_faults` faults, each after recovery from the last. SIGUSR2 is a rolling restart."""
    draw = random.Random(SEED + 1000 * case)
    asked = kinds()
    faults: list[dict[str, Any]] = []
    error = ""
    with servers.running("recovery", servers.lorikeet(None, *FLAGS)) as server:
        client, fleet = Client(f"http://127.0.0.1:{server.port}", timeout_s=BACK_S), Fleet(server)
        undisturbed = [ask(client, index, kind) for index, kind in enumerate(asked)]
        load = Load(client, asked)
        with load.running(SEED + 31 * case):
            try:
                for _ in range(num_faults):
                    for index in range(2):
                        fleet.await_served(index)
                    time.sleep(draw.uniform(*PAUSE_S))
                    index = draw.randrange(2)
                    faults.append({"shard": index, "at": time.monotonic()})
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
        if answer.error or answer.unsound or answer.output != undisturbed[answer.kind].output
    ]
    for fault in faults:
        fault["gap_s"] = round(gap(load.answers, fault["at"]), 3)
        del fault["at"]
    return Case(f"faults {case}", {"answers": len(load.answers), "wrong": wrong, "faults": faults}, error)


def gap(answers: list[Answer], at: float) -> float:
    """The longest pause of a stream that began, or lasted, between a fault and SETTLE_S later."""
    pauses = [
        later - earlier
        for answer in answers
        for earlier, later in zip(answer.moments, answer.moments[1:], strict=False)
        if later >= at and earlier <= at + SETTLE_S
    ]
    return max(pauses, default=0.0)


def longest_gap(raw: Raw) -> float:
    return max(float(fault["gap_s"]) for fault in raw["faults"])
