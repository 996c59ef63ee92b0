"""Tenant B requests tenant A's private adapter in every known way, wherever the adapter is: at its hub, in a slot, on
disk.

A hub on the loopback gives the repository to A's token alone. Every answer to B must be a rejection without A's text or
digest, and B's own texts are what PEFT generates.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.evidence.figure import Case, Cases
from benchmarks.load import adapted, servers

NUM_TOKENS = 12
PROMPT = "what did the parrot say"
PRIVATE, OPEN = "tenant-a/private", "tenant-b/own"
A_TOKEN, B_TOKEN = "hf_tenant_a", "hf_tenant_b"
A_KEY, B_KEY = "key-of-tenant-a", "key-of-tenant-b"
PLACES = ("on the hub", "in a slot", "out of slots", "on disk", "in a slot again")
ASKS_AT_LEAST = 30


@dataclass(frozen=True)
class Scene:
    """The server's base and what is right: greedy ids under A's adapter, B's own and none."""

    base: adapted.AdaptedBase
    right: dict[str | None, list[int]]
    commit: str


@dataclass(frozen=True)
class Ask:
    """One way of asking."""

    path: str
    body: Mapping[str, Any]
    token: str


def measure() -> Cases:
    """One case per place in which A's adapter lies while B asks; together, since each follows from the one before."""
    from tests.hub_server import Repository, commit_of, hub

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base, files, right = _made(folder)
        scene = Scene(base, right, commit_of(files[PRIVATE]))
        repositories = {PRIVATE: Repository(files[PRIVATE], token=A_TOKEN), OPEN: Repository(files[OPEN])}
        flags = ["--default-adapter-source", "hub", "--huggingface-hub-cache", str(base.root)]
        flags += [
            "--api-keys",
            _keys(folder),
            "--api-keys-optional",
            "--adapters",
            _catalogue(folder),
            "--auth-cache-ttl-s",
            "1",
        ]
        environment = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": A_TOKEN}
        with hub(repositories) as running:
            environment["HF_ENDPOINT"] = running.url
            with adapted.serving("tenants", base, "--max-active-adapters", "1", *flags, **environment) as server:
                for place in PLACES:
                    yield uvloop.run(_case(server, scene, place))


def _made(folder: Path) -> tuple[adapted.AdaptedBase, dict[str, dict[str, bytes]], dict[str | None, list[int]]]:
    """Base, repositories' files, and greedy ids."""
    from benchmarks.models import adapter_files
    from tests import tiny
    from tests.oracles import peft_texts  # torch

    model = tiny.make("llama", folder / "base", tokenizer=True)
    base = adapted.AdaptedBase(model, folder, ("--dtype", "float32", "--threads", "1", "--cpu-memory", "256MiB"))
    made = adapter_files.make(model, folder / "made", ["a", "b"], ("q_proj", "v_proj"), rank=4)
    names: dict[str | None, Path | None] = {None: None, PRIVATE: made[0], OPEN: made[1]}
    right = {name: peft_texts.greedy(model, each, [PROMPT], NUM_TOKENS)[0] for name, each in names.items()}
    files = {
        name: {path.name: path.read_bytes() for path in each.iterdir()}
        for name, each in zip((PRIVATE, OPEN), made, strict=True)
    }
    return base, files, right


def _keys(folder: Path) -> str:
    keys = {"tenant-a": A_KEY, "tenant-b": B_KEY}
    hashed = [{"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()} for name, key in keys.items()]
    path = folder / "keys.yaml"
    path.write_text(json.dumps(hashed))
    return str(path)


def _catalogue(folder: Path) -> str:
    """A's adapter once more as an alias for A's key alone, opened with the operator's own token."""
    path = folder / "catalogue.yaml"
    path.write_text(json.dumps({"secret": {"source": "hub", "id": PRIVATE, "keys": ["tenant-a"]}}))
    return str(path)


async def _case(server: servers.RunningServer, scene: Scene, place: str) -> Case:
    """Have A's adapter lie there, then let B ask."""
    wrong: list[str] = []
    digest = ""

    async def right(name: str | None, token: str) -> str:
        reply = await _generate(server.port, name, token)
        if reply.status != 200 or _ids(reply) != scene.right[name]:
            wrong.append(f"text of {name}: {reply.status} {reply.body[:300]!r}")
        return reply.headers.get("x-adapter-digest", "")

    if place != "on the hub":
        digest = await right(PRIVATE, A_TOKEN)
        resident = adapted.num_resident(server.port)
        if place == "out of slots":
            await right(OPEN, B_TOKEN)  # there is one slot
        if place == "on disk":
            await adapted.admin(server.port, "unload", adapter_id=PRIVATE, adapter_source="hub")
        if (adapted.num_resident(server.port), resident) != (int(place != "on disk"), 1):
            wrong.append(f"{resident}, then {adapted.num_resident(server.port)} adapters are resident")
    asks = list(_asks(scene, digest))
    for ask in asks:
        if result := _validated(ask, await adapted.send(server.port, ask.path, ask.body or None, ask.token), digest):
            wrong.append(f"{ask.path} {dict(ask.body)} {ask.token}: {result}")
    await right(None, B_TOKEN)
    await right(OPEN, B_TOKEN)
    if place != "on the hub":
        await right(PRIVATE, A_TOKEN)
    raw = {"asks": len(asks), "wrong": wrong, "alive": server.alive(), "digest": digest}
    return Case(place, raw, "" if raw["alive"] else f"server ended: {servers.tail(server.log)}")


def _asks(scene: Scene, digest: str) -> Iterator[Ask]:
    """Every way in which B, or somebody without a token, might come near A's adapter."""
    commit, cache = scene.commit, "models--tenant-a--private"
    names = [
        PRIVATE,
        f"{PRIVATE}@{commit}",
        f"{PRIVATE}@main",
        "secret",
        PRIVATE.upper(),
        f"./{PRIVATE}",
        "secret@main",
    ]
    local = [cache, f"{cache}/snapshots/{commit}", str(scene.base.root / cache / "snapshots" / commit), PRIVATE]
    local += [
        str(scene.base.store),
        f"../store/{digest}",
        "../store",
        f"{scene.base.store}/{digest}.safetensors",
        digest,
    ]
    for token in ("", B_TOKEN, B_KEY, "' or 1=1"):
        wanted: list[dict[str, Any]] = [{"adapter_id": name, "adapter_source": "hub"} for name in names]
        wanted += [{"adapter_id": "secret"}, {"adapter_id": PRIVATE, "api_token": B_TOKEN}]
        wanted += [{"adapter_id": name, "adapter_source": "local"} for name in local if name]
        wanted += [
            {"merged_adapters": {"ids": ids, "weights": [1.0, 0.1]}} for ids in ([PRIVATE, OPEN], ["secret", OPEN])
        ]
        for parameters in wanted:
            if "merged_adapters" in parameters:
                parameters = {**parameters, "adapter_source": "hub"}
            yield Ask("/generate", {"inputs": PROMPT, "parameters": {**parameters, "max_new_tokens": 4}}, token)
        for name in (PRIVATE, "secret", f"{PRIVATE}@{commit}"):
            yield Ask("/v1/completions", {"model": name, "prompt": PROMPT, "max_tokens": 4}, token)
            message = {"role": "user", "content": PROMPT}
            yield Ask("/v1/chat/completions", {"model": name, "messages": [message], "max_tokens": 4}, token)
        for verb in ("load", "pin", "unload"):
            yield Ask(f"/admin/adapters/{verb}", {"adapter_id": PRIVATE, "adapter_source": "hub"}, token)
        yield Ask("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": PRIVATE}, token)
        yield Ask("/admin/adapters", {}, token)


def _validated(ask: Ask, reply: adapted.Reply, digest: str) -> str:
    """Why the answer is not right, or an empty text."""
    everything = json.dumps(dict(reply.headers)).encode() + reply.body
    if not 400 <= reply.status < 500:
        return f"{reply.status} {reply.body[:300]!r}"
    is_echo = digest in json.dumps(dict(ask.body))  # B named it
    if b"x-adapter" in everything or (digest and not is_echo and digest[:12].encode() in everything):
        return f"reveals A's adapter: {everything[:500]!r}"
    return ""


async def _generate(port: int, name: str | None, token: str) -> adapted.Reply:
    more = {} if name is None else {"adapter_source": "hub"}
    return await adapted.generate(port, PROMPT, name, NUM_TOKENS, details=True, bearer=token, **more)


def _ids(reply: adapted.Reply) -> list[int]:
    return [token["id"] for token in reply.json["details"]["tokens"]]
