"""A catalogue of 200 adapters of which five are broken: what `lorikeet-adapters check` names and how long it takes, and
whether a server over the same file serves exactly the others.

    python -m benchmarks.adapters_catalogue [--quick]
"""

import asyncio
import contextlib
import json
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import adapted, servers
from benchmarks.case import Case, Cases, Raw
from benchmarks.prompts import prompts

ROUNDS = 5
COUNT = 200
PLACES = (7, 42, 99, 150, 198)
"""Which of them are broken."""
CLIENTS = 4
SEED = 17_000
SETTINGS: dict[str, Any] = {"rounds": ROUNDS, "adapters": COUNT, "broken": PLACES, "rank": 16, "seed": SEED}


def measure(finished: frozenset[str] = frozenset(), base: adapted.Base | None = None, rounds: int = ROUNDS) -> Cases:
    """One case per round of the check, and one server at the end of the first."""
    base = base or adapted.full()
    with tempfile.TemporaryDirectory() as name, _broken(base, Path(name)) as (names, broken):
        catalogue = Path(name) / "catalogue.yaml"
        catalogue.write_text(
            json.dumps({f"alias-{i}": {"source": "local", "id": each} for i, each in enumerate(names)})
        )
        for number in range(rounds):
            if f"round {number}" not in finished:
                raw = _checked(base, catalogue, broken)
                raw["served"] = uvloop.run(_served(base, catalogue, broken)) if number == 0 else {}
                yield Case(f"round {number}", raw)


@contextlib.contextmanager
def _broken(base: adapted.Base, folder: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Names of all adapters, and the aliases of those that are broken, each in its own way."""
    from benchmarks import adapter_files

    names = [f"attention-{i}" for i in range(COUNT)]
    adapter_files.make(base.model, base.root, names)
    for place, break_it in zip(PLACES, BREAKS, strict=True):
        copy = base.root / f"broken-{place}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(base.root / names[place], copy)
        break_it(copy)
        names[place] = copy.name
    try:
        yield names, sorted(f"alias-{place}" for place in PLACES)
    finally:
        for place in PLACES:
            shutil.rmtree(base.root / f"broken-{place}", ignore_errors=True)


def _configured(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def _rewritten(edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        path.write_bytes(edit(path.read_bytes()))

    return change


BREAKS: Sequence[Callable[[Path], None]] = (
    _rewritten(lambda content: content[:-1000]),
    _rewritten(lambda content: struct.pack("<Q", 1 << 50) + content[8:]),
    _configured(r=32),
    _configured(peft_type="IA3"),
    lambda folder: (folder / "adapter_config.json").unlink(),
)
"""Truncated, forged, of another rank, of a kind that is not served, without a configuration."""


def _checked(base: adapted.Base, catalogue: Path, broken: list[str]) -> dict[str, Any]:
    """What the command says, and in how many seconds."""
    command = [
        sys.executable,
        "-m",
        "lorikeet.adapters.check",
        "check",
        str(catalogue),
        "--model-id",
        str(base.model),
        "--json",
    ]
    command += ["--local-adapter-root", str(base.root)]
    start = time.monotonic()
    done = subprocess.run(command, cwd=servers.REPOSITORY, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - start
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    refused = sorted(row["alias"] for row in rows if row["state"] == "refused")
    return {
        "seconds": round(seconds, 3),
        "rows": len(rows),
        "code": done.returncode,
        "misjudged": sorted(set(refused) ^ set(broken)),
        "reasons": {row["alias"]: row["reason"] for row in rows if row["reason"]},
    }


async def _served(base: adapted.Base, catalogue: Path, broken: list[str]) -> dict[str, Any]:
    """How many aliases answer and how many are listed as sound; and whatever contradicts the check."""
    text = prompts(1, 16, SEED)[0]
    wrong: list[str] = []
    with adapted.serving("catalogue", base, "--adapters", str(catalogue)) as server:
        listed = (await adapted.send(server.port, "/v1/models")).json["data"]
        sound = [model["id"] for model in listed if model["id"].startswith("alias-") and not model.get("problem")]
        waiting = iter(range(COUNT))
        statuses: dict[str, int] = {}

        async def client() -> None:
            for number in waiting:
                alias = f"alias-{number}"
                reply = await adapted.generate(server.port, text, alias, 1)
                statuses[alias] = reply.status
                if (400 <= reply.status < 500) != (alias in broken) or (reply.status != 200) != (alias in broken):
                    wrong.append(f"{alias}: {reply.status} {reply.body[:200]!r}")

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
    if set(sound) & set(broken) or len(sound) != COUNT - len(broken):
        wrong.append(f"{len(sound)} are listed as sound")
    return {"answered": sum(status == 200 for status in statuses.values()), "listed": len(sound), "wrong": wrong}


def num_misjudged(raw: Raw) -> float:
    """By the command: aliases named wrongly, rows that lack, another exit code than 1."""
    return float(len(raw["misjudged"]) + (COUNT - raw["rows"]) + (raw["code"] != 1))


def num_unlike(raw: Raw) -> float:
    """By the server: answers and listings that are not those of 195 sound adapters; told by the first round."""
    served = raw["served"]
    if not served:
        return 0.0
    return float(len(served["wrong"]) + abs(COUNT - len(PLACES) - served["answered"]))


if __name__ == "__main__":
    small, count = (adapted.small(), 1) if "--quick" in sys.argv else (None, ROUNDS)
    for case in measure(base=small, rounds=count):
        print(case.name, json.dumps(case.raw, ensure_ascii=False), case.error, flush=True)
