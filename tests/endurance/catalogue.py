"""A catalogue of 200 adapters, five of them broken: the report of `lorikeet-adapters check`, and the answers of a
server with the same catalogue.
"""

import asyncio
import contextlib
import json
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.load import adapted, servers
from benchmarks.models import adapter_files
from benchmarks.models.prompts import prompts

COUNT = 200
PLACES = (7, 42, 99, 150, 198)
"""The broken ones."""
CLIENTS = 4
SEED = 17_000


@contextlib.contextmanager
def written(base: adapted.AdaptedBase, folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """The catalogue, and the aliases of its broken adapters, each broken in another way."""
    names = [f"attention-{i}" for i in range(COUNT)]
    adapter_files.make(base.model, base.root, names)
    for place, break_it in zip(PLACES, BREAKS, strict=True):
        copy = base.root / f"broken-{place}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(base.root / names[place], copy)
        break_it(copy)
        names[place] = copy.name
    path = folder / "catalogue.yaml"
    path.write_text(json.dumps({f"alias-{i}": {"source": "local", "id": each} for i, each in enumerate(names)}))
    try:
        yield path, sorted(f"alias-{place}" for place in PLACES)
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
"""Truncated, forged header, wrong rank, unsupported kind, no configuration."""


def checked(base: adapted.AdaptedBase, catalogue: Path, broken: list[str]) -> dict[str, Any]:
    """The report of the command, and its seconds."""
    command = [sys.executable, "-m", "lorikeet.adapters.check", "check", str(catalogue)]
    command += ["--model-id", str(base.model), "--json"]
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


async def served(base: adapted.AdaptedBase, catalogue: Path, broken: list[str]) -> dict[str, Any]:
    """How many aliases answer, how many are listed without a problem, and every answer that contradicts the check."""
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
        wrong.append(f"{len(sound)} are listed without a problem")
    return {"answered": sum(status == 200 for status in statuses.values()), "listed": len(sound), "wrong": wrong}
