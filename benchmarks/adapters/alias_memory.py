"""The router's memory for 10 000 known aliases: its private memory over that with a catalogue of one.

Every alias names another adapter, which the loader validates at start; some are requested before memory is read.

    python -m benchmarks.adapters.alias_memory [--count N]
"""

import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load import adapted, memory, servers
from benchmarks.models.prompts import prompts

COUNT = 10_000
ASKED = 200
VALIDATED_S = 500.0
SEED = 19_000


def measure(count: int = COUNT, asked: int = ASKED) -> Cases:
    """One case: both servers, one after the other, with the same number of requests."""
    with tempfile.TemporaryDirectory() as name:
        base = _made(Path(name), count)
        few = _catalogue(base.folder, 1)
        with adapted.serving("known", base, "--adapters", str(few)) as server:
            without = uvloop.run(_used(server, ["alias-0"] * asked, 1))
        many = _catalogue(base.folder, count)
        start = time.monotonic()
        with adapted.serving("known", base, "--adapters", str(many)) as server:
            names = [f"alias-{i * count // asked}" for i in range(asked)]
            result = uvloop.run(_used(server, names, count))
        raw = {"without_mb": without["mb"], "with_mb": result["mb"], "seconds": round(time.monotonic() - start, 1)}
        error = "" if result["listed"] == count and not result["wrong"] else f"{result['listed']} of {count} are listed"
        yield Case("memory", raw, error)


def _made(folder: Path, count: int) -> adapted.Base:
    """`count` folders with tiny adapters of fifty different contents."""
    from benchmarks.models import adapter_files

    base = adapted.small(folder)
    sources = adapter_files.make(base.model, folder / "made", [f"a-{i}" for i in range(50)], ("q_proj",), rank=1)
    base.root.mkdir(exist_ok=True)
    for number in range(count):
        shutil.copytree(sources[number % len(sources)], base.root / f"adapter-{number}")
    return base


def _catalogue(folder: Path, count: int) -> Path:
    path = folder / f"catalogue-{count}.json"
    entries = {f"alias-{i}": {"source": "local", "id": f"adapter-{i}"} for i in range(count)}
    path.write_text(json.dumps(entries))  # JSON is YAML
    return path


async def _used(server: servers.Server, names: list[str], count: int) -> dict[str, Any]:
    """The router's memory once all aliases are validated and some were requested."""
    router = memory.child(server, "router")
    until = time.monotonic() + VALIDATED_S
    sound: list[str] = []
    while len(sound) < count and time.monotonic() < until:
        listed = (await adapted.send(server.port, "/v1/models")).json["data"]
        sound = [each["id"] for each in listed if each["id"].startswith("alias-") and not each.get("problem")]
        await asyncio.sleep(1.0)
    text = prompts(1, 8, SEED)[0]
    statuses = [(await adapted.generate(server.port, text, name, 1)).status for name in names]
    return {
        "mb": round(memory.private_mb(router), 1),
        "listed": len(sound),
        "wrong": sum(status != 200 for status in statuses),
    }


def added_mb(raw: Raw) -> float:
    return float(raw["with_mb"] - raw["without_mb"])


if __name__ == "__main__":
    parser = arguments.parser(__doc__)
    parser.add_argument("--count", type=int, default=COUNT)
    sys.exit(arguments.print_cases(measure(parser.parse_args().count), {"MB": added_mb}))
