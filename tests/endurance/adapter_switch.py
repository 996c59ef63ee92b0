"""An alias that changes its revision repeatedly under load: every answer is complete, and is what PEFT generates with
the revision whose digest the answer names.

A hub on the loopback has all revisions. Texts are exact: a tiny model in float32.
"""

import asyncio
import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.evidence.figure import Case, Cases
from benchmarks.load import adapted, servers
from benchmarks.models import adapter_files
from tests import tiny
from tests.hub_server import Repository, commit_of, hub
from tests.oracles import peft_texts

SWITCHES = 20
CLIENTS = 8
NUM_TOKENS = 12
ANSWERS_EACH = 16
"""Answers to requests that were sent between one switch and the next."""
REPOSITORY, ALIAS = "team/support", "support"
PROMPTS = ("a parrot", "the quick brown fox", "def main() -> None:", "once upon a time in a tree")


@dataclass(frozen=True)
class Version:
    """One revision: its commit, and PEFT's greedy ids for each prompt."""

    commit: str
    right: list[list[int]]


@dataclass
class Observed:
    """Answers since the last switch."""

    answers: int = 0
    """To requests that were sent since."""
    earlier: int = 0
    """To those that were under way when it happened."""
    wrong: list[str] = field(default_factory=list)


class Load:
    """Clients that request the alias without a pause, and their answers."""

    def __init__(self, port: int, versions: Sequence[Version]) -> None:
        self._port = port
        self._versions = {version.commit: version for version in versions}
        self._commits = [version.commit for version in versions]
        self._number = 0
        """Number of the revision that requests sent from now on must get."""
        self._is_switching = False
        self._seen = Observed()
        self._commit_of: dict[str, str] = {}
        """By digest: one digest is one revision's."""
        self._clients: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._clients = [asyncio.create_task(self._ask(index)) for index in range(CLIENTS)]

    async def stop(self) -> None:
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def switch(self, catalogue: Path, number: int) -> Observed:
        """Let the alias name another revision. Returns the answers since."""
        self._seen = Observed()
        self._is_switching = True
        name_revision(catalogue, number)
        await adapted.admin(self._port, "catalogue/reload")
        self._number, self._is_switching = number, False
        while self._seen.answers < ANSWERS_EACH:
            await asyncio.wait(self._clients, timeout=0.05)
            for client in self._clients:
                if client.done():
                    client.result()  # a client that broke ends the run
        return self._seen

    async def _ask(self, index: int) -> None:
        for turn in itertools.count(index):
            place = turn % len(PROMPTS)
            sent_at = None if self._is_switching else self._number
            reply = await adapted.generate(self._port, PROMPTS[place], ALIAS, NUM_TOKENS, details=True)
            if fault := self._validated(reply, place, sent_at):
                self._seen.wrong.append(fault)
            if sent_at == self._number and not self._is_switching:
                self._seen.answers += 1
            else:
                self._seen.earlier += 1

    def _validated(self, reply: adapted.Reply, place: int, sent_at: int | None) -> str:
        """Why an answer is not right, or an empty text."""
        if reply.status != 200:
            return f"{reply.status} {reply.body[:300]!r}"
        commit, digest = reply.headers["x-adapter-revision"], reply.headers["x-adapter-digest"]
        if self._commit_of.setdefault(digest, commit) != commit:
            return f"{digest} is the digest of {commit} and of {self._commit_of[digest]}"
        ids = [token["id"] for token in reply.json["details"]["tokens"]]
        if ids != self._versions[commit].right[place]:
            return f"another text than that of {commit}: {ids}"
        if sent_at is not None and self._commits.index(commit) < sent_at:
            return f"sent after the switch to revision {sent_at}, answered by {self._commits.index(commit)}"
        return ""


def measure(switches: int = SWITCHES) -> Cases:
    """One case per switch, all under one load."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base, repositories, versions = _made(folder, switches + 1)
        catalogue = folder / "catalogue.yaml"
        name_revision(catalogue, 0)
        flags = ("--adapters", str(catalogue), "--huggingface-hub-cache", str(folder / "hub"))
        with hub(repositories) as running, asyncio.Runner() as runner:
            environment = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_ENDPOINT": running.url}
            with adapted.serving("switch", base, *flags, **environment) as server:
                load = Load(server.port, versions)
                runner.run(load.start())
                try:
                    for number in range(1, switches + 1):
                        yield _case(number, runner.run(load.switch(catalogue, number)), server)
                finally:
                    runner.run(load.stop())


def _case(number: int, seen: Observed, server: servers.RunningServer) -> Case:
    raw = {"answers": seen.answers, "earlier": seen.earlier, "wrong": seen.wrong, "alive": server.alive()}
    return Case(f"switch {number}", raw, "" if raw["alive"] else f"server ended: {servers.tail(server.log)}")


def _made(folder: Path, count: int) -> tuple[adapted.AdaptedBase, dict[str, Any], list[Version]]:
    """Base, the hub's repositories, and what is right for each revision."""
    model = tiny.make("llama", folder / "base", tokenizer=True)
    base = adapted.AdaptedBase(model, folder, ("--dtype", "float32", "--threads", "1", "--cpu-memory", "256MiB"))
    made = adapter_files.make(model, folder / "made", [f"v{i}" for i in range(count)], ("q_proj", "v_proj"), rank=4)
    contents = [{path.name: path.read_bytes() for path in each.iterdir()} for each in made]
    branches = {each.name: content for each, content in zip(made, contents, strict=True)}
    versions = [
        Version(commit_of(content), peft_texts.greedy(model, each, PROMPTS, NUM_TOKENS))
        for each, content in zip(made, contents, strict=True)
    ]
    if any(one.right == other.right for one, other in itertools.pairwise(versions)):
        raise RuntimeError("two revisions generate the same text: a switch would not show")
    return base, {REPOSITORY: Repository(contents[0], branches=branches)}, versions


def name_revision(catalogue: Path, number: int) -> None:
    catalogue.write_text(json.dumps({ALIAS: {"source": "hub", "id": REPOSITORY, "revision": f"v{number}"}}))
