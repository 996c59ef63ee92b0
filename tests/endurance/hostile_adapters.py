"""Broken and malicious adapters sent to one running server, while the texts of other requests are compared with PEFT's.

Every batch sends some of the broken adapters of the unit tests, and weight files whose header has random bytes. A
rejection must be a 4xx that names the fault; afterwards pages, slots and memory must be what they were. A changed
header that safetensors itself still reads as before must give the sound adapter's text instead.
"""

import asyncio
import contextlib
import random
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.evidence.figure import Case, Cases
from benchmarks.load import adapted, servers
from tests.endurance.leaks import idle_pages

BATCHES, FUZZED = 8, 25
NUM_TOKENS = 12
SEED = 21_000
MEMORY_MB = 16.0
"""The most that all batches may leave behind: allocators keep some."""
PROMPT = "a parrot repeats what it said"


@dataclass(frozen=True)
class Attempt:
    """A folder to ask for, and the fault that the refusal must name; without one the sound adapter's text."""

    name: str
    fault: str | None


@dataclass(frozen=True)
class Scene:
    """The server's base, its folders and what is right: greedy ids by adapter."""

    base: adapted.AdaptedBase
    right: dict[str | None, list[int]]


def measure(batches: int = BATCHES, fuzzed: int = FUZZED) -> Cases:
    """One case per batch, all against one server; an eighth of the broken adapters and some fuzzed headers each."""
    with tempfile.TemporaryDirectory() as folder:
        scene = _scene(Path(folder))
        with adapted.serving("hostile", scene.base, "--auth-cache-ttl-s", "1") as server:
            uvloop.run(_warm(server, scene))
            for number in range(batches):
                yield _batch(server, scene, number, fuzzed)


def _scene(folder: Path) -> Scene:
    from benchmarks.models import adapter_files
    from tests import tiny
    from tests.oracles import peft_texts  # torch

    model = tiny.make("llama", folder / "base", tokenizer=True)
    base = adapted.AdaptedBase(model, folder, ("--dtype", "float32", "--threads", "1", "--cpu-memory", "256MiB"))
    names = ("sound", "other")
    adapter_files.make(model, base.root, names, ("q_proj", "v_proj"), rank=4)
    right: dict[str | None, list[int]] = {None: peft_texts.greedy(model, None, [PROMPT], NUM_TOKENS)[0]}
    for name in names:
        right[name] = peft_texts.greedy(model, base.root / name, [PROMPT], NUM_TOKENS)[0]
    return Scene(base, right)


async def _warm(server: servers.RunningServer, scene: Scene) -> None:
    """Allocate before the first batch what first loads and first rejections allocate permanently."""
    attempts = [attempt for number in range(BATCHES) for attempt in _broken(scene, number)]
    draw = random.Random(SEED - 1)
    attempts += [_fuzzed(scene, f"warm-{number}", draw) for number in range(FUZZED)]
    for name in scene.right:
        await _ask(server.port, name)
    await _send(server.port, scene, attempts)  # as many at once as later, so that as many reader processes stay


def _batch(server: servers.RunningServer, scene: Scene, number: int, fuzzed: int) -> Case:
    draw = random.Random(SEED + number)
    attempts = [*_broken(scene, number), *(_fuzzed(scene, f"fuzzed-{number}-{i}", draw) for i in range(fuzzed))]
    draw.shuffle(attempts)
    before = {"memory_mb": group_mb(server), "resident": adapted.num_resident(server.port)}
    wrong, num_texts = uvloop.run(_send(server.port, scene, attempts))
    raw = {
        "attempts": len(attempts),
        "wrong": wrong,
        "texts_meanwhile": num_texts,
        "alive": server.alive(),
        "marks": [str(path) for path in Path("/tmp").glob("must-not-exist-by-*")],
        **idle_pages(server.port),
        "slots_held": adapted.num_resident(server.port) - before["resident"],
        "memory_grown_mb": round(group_mb(server) - before["memory_mb"], 1),
    }
    return Case(f"batch {number}", raw, "" if raw["alive"] else f"server ended: {servers.tail(server.log)}")


def _broken(scene: Scene, number: int) -> list[Attempt]:
    """This batch's part of the broken adapters, in folders."""
    from tests.adapters.hostile import CASES

    attempts = []
    for index, (change, _, fault) in list(enumerate(CASES.values()))[number::BATCHES]:
        folder = _copy(scene, f"broken-{index}")
        change(folder)
        attempts.append(Attempt(folder.name, fault))
    return attempts


def _fuzzed(scene: Scene, name: str, draw: random.Random) -> Attempt:
    """The sound adapter with random bytes in its weights' header."""
    from safetensors import safe_open

    def contents(path: Path) -> dict[str, Any]:
        with safe_open(path, framework="pt") as file:
            return {key: (file.get_slice(key).get_dtype(), file.get_tensor(key).tolist()) for key in file.keys()}  # noqa: SIM118

    folder = _copy(scene, name)
    path = folder / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    for _ in range(draw.randint(1, 4)):
        content[draw.randrange(8 + length)] = draw.randrange(256)
    path.write_bytes(content)
    with contextlib.suppress(Exception):  # whatever safetensors raises: then it must be refused
        if contents(path) == contents(scene.base.root / "sound" / path.name):
            return Attempt(name, None)
    return Attempt(name, ".")


def _copy(scene: Scene, name: str) -> Path:
    folder = scene.base.root / name
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(scene.base.root / "sound", folder))


async def _send(port: int, scene: Scene, attempts: Sequence[Attempt]) -> tuple[list[str], int]:
    """All attempts by four clients, while three others read texts; what was wrong, and how many texts were read."""
    waiting = iter(attempts)
    wrong: list[str] = []
    done = asyncio.Event()
    num_texts = 0

    async def attacker() -> None:
        for attempt in waiting:
            if result := _validated(scene, attempt, await _ask(port, attempt.name)):
                wrong.append(f"{attempt.name}: {result}")

    async def reader(name: str | None) -> None:
        nonlocal num_texts
        while not done.is_set():
            reply = await _ask(port, name)
            num_texts += 1
            if reply.status != 200 or _ids(reply) != scene.right[name]:
                wrong.append(f"text of {name}: {reply.status} {reply.body[:300]!r}")

    readers = [asyncio.create_task(reader(name)) for name in scene.right]
    await asyncio.gather(*(attacker() for _ in range(4)))
    done.set()
    await asyncio.gather(*readers)
    return wrong, num_texts


async def _ask(port: int, name: str | None) -> adapted.Reply:
    return await adapted.generate(port, PROMPT, name, NUM_TOKENS, details=True)


def _validated(scene: Scene, attempt: Attempt, reply: adapted.Reply) -> str:
    """Why the answer is not right, or an empty text."""
    if attempt.fault is None:
        same = reply.status == 200 and _ids(reply) == scene.right["sound"]
        return "" if same else f"{reply.status} {reply.body[:300]!r} instead of the sound adapter's text"
    if not 400 <= reply.status < 500 or reply.json.get("error_type") != "generation":
        return f"{reply.status} {reply.body[:300]!r}"
    names_it = re.search(f"(?is){attempt.fault}", reply.json["error"])
    return "" if names_it else f"{reply.json['error'][:300]} does not name {attempt.fault!r}"


def _ids(reply: adapted.Reply) -> list[int]:
    return [token["id"] for token in reply.json["details"]["tokens"]]


def proportional_mb(pid: int) -> float:
    """Resident memory of one process in millions of bytes, 0 for one that is gone."""
    with contextlib.suppress(OSError):
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024 / 1e6
    return 0.0


def group_mb(server: servers.RunningServer) -> float:
    """Megabytes of all processes of a server."""
    return sum(proportional_mb(pid) for pid in servers.group(server.process.pid))
