"""A base with adapters under measurement: its model, the folder of its adapters, how a server over them is started and
asked.
"""

import asyncio
import contextlib
import dataclasses
import json
import re
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.load import peers, servers
from lorikeet.launcher.bench.load import ConnectionPool

ADMIN_KEY = "key-of-the-measurement"
ANSWER_S = 300.0
_SAMPLE = re.compile(r"(\w+(?:\{[^}]*\})?) (\S+)")


@dataclass(frozen=True)
class AdaptedBase:
    """A base and the folder in which its adapters are made and kept in served form."""

    model: Path
    folder: Path
    flags: tuple[str, ...] = ()

    @property
    def root(self) -> Path:
        return self.folder / "adapters"

    @property
    def store(self) -> Path:
        return self.folder / "store"


def full() -> AdaptedBase:
    """The 200 M-parameter Llama in bf16."""
    model = peers.model_folder()
    return AdaptedBase(model, model.parent / "adapted", ("--cpu-memory", "2GiB", "--adapter-memory-fraction", "0.5"))


def small(folder: Path | None = None) -> AdaptedBase:
    """A Llama of two narrow layers in float32, for a look at whether things work and for exact texts."""
    from benchmarks.models import random_llama  # imports torch

    folder = folder or random_llama.MODELS / "tiny"
    flags = ("--cpu-memory", "256MiB", "--adapter-memory-fraction", "0.5", "--dtype", "float32", "--threads", "1")
    return AdaptedBase(random_llama.llama_tiny(folder / "base"), folder, flags)


def command(base: AdaptedBase, *flags: str, **environment: str) -> servers.Command:
    """Our server over a base's adapters; administration is open for `ADMIN_KEY`."""
    base.root.mkdir(parents=True, exist_ok=True)
    adapter_flags = ("--default-adapter-source", "local", "--local-adapter-root", str(base.root), *base.flags)
    store = () if "--adapter-store" in flags else ("--adapter-store", str(base.store))
    server = servers.lorikeet(base.model, *adapter_flags, *store, *flags)
    return dataclasses.replace(server, environment={**server.environment, "ADMIN_KEY": ADMIN_KEY, **environment})


@contextlib.contextmanager
def serving(name: str, base: AdaptedBase, *flags: str, **environment: str) -> Iterator[servers.RunningServer]:
    """A running server over the base's adapters."""
    with servers.running(name, command(base, *flags, **environment)) as server:
        yield server


@dataclass(frozen=True)
class Reply:
    """One answer that is complete; headers by lower-case name."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def send(port: int, path: str, body: Mapping[str, Any] | None = None, token: str = "") -> Reply:
    """POST of a JSON object, GET without one."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    connections = ConnectionPool(f"http://127.0.0.1:{port}", headers, ANSWER_S)
    try:
        content = json.dumps(body).encode()
        response = await (connections.get(path) if body is None else connections.post(path, content))
        return Reply(response.status, response.headers, response.body)
    finally:
        await connections.close()


async def generate(port: int, prompt: str, adapter: str | None, num_tokens: int, **parameters: Any) -> Reply:
    """A greedy text of so many tokens from `/generate`."""
    token = parameters.pop("bearer", "")
    fields = {"max_new_tokens": num_tokens, "ignore_eos_token": True, **parameters}
    if adapter is not None:
        fields["adapter_id"] = adapter
    return await send(port, "/generate", {"inputs": prompt, "parameters": fields}, token)


async def admin(port: int, verb: str, **body: Any) -> Reply:
    """What the operator does with adapters. Raises RuntimeError if the server rejects it."""
    path = f"/admin/{verb}" if "/" in verb else f"/admin/adapters/{verb}"
    reply = await send(port, path, body, ADMIN_KEY)
    if reply.status != 200:
        raise RuntimeError(f"{verb} {body}: {reply.status} {reply.body[:300]!r}")
    return reply


def samples(port: int) -> dict[str, float]:
    """Every sample of `/metrics`, labels inside the name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        matches = (_SAMPLE.fullmatch(line) for line in answer.read().decode().splitlines())
    return {match[1]: float(match[2]) for match in matches if match}


def num_resident(port: int) -> int:
    """Adapters in slots."""
    return int(samples(port).get("lorikeet_adapters_resident", 0))


async def until_resident(port: int, count: int, every_s: float = 0.02, timeout_s: float = ANSWER_S) -> None:
    """Returns once so many adapters are in slots; looks so often."""
    until = time.monotonic() + timeout_s
    while await asyncio.to_thread(num_resident, port) < count:
        if time.monotonic() > until:
            raise TimeoutError(f"{num_resident(port)} of {count} adapters are resident after {timeout_s} s")
        await asyncio.sleep(every_s)


async def make_cold(port: int, names: list[str]) -> None:
    """Neither memory nor disk tier holds them afterwards."""
    for name in names:
        await admin(port, "load", adapter_id=name)
        await admin(port, "unload", adapter_id=name, disk=True)
