"""Attackers at fixed rates, as a process of its own: `python -m tests.attacks.attackers PORT ATTACK SECONDS [PEER]`.

Eight clients, each with an address of its own, repeat one attack. With PEER they do something harmless at the same rate
instead: `health` sends GET /health, `users` are ordinary users who generate short texts.

No attack begins after SECONDS. Attacks that still wait for an answer are cancelled when the standard input ends.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import random
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto import shard_pb2_grpc
from tests.e2e.launched import ROOT

NUM_ATTACKERS = 8
MAX_HELD = 50
"""Connections that one attacker holds open."""
MIB = 1 << 20
ANSWER_S = 20.0
"""How long an attacker waits for an answer."""
LOOP = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}" + 3 * "{% endfor %}"
NUM_FRESH = 40
NUM_BOMBS = 16
NUM_CANARIES = 10
"""Adapters that canaries load, next to an attack and next to harmless clients."""
HUB_PORT, SHARD = "ATTACKED_HUB_PORT", "ATTACKED_SHARD"
"""Variables of the environment: the port of the hub that attackers serve, and the address of the server's shard."""


@dataclass
class Attacker:
    """One client."""

    port: int
    number: int
    draw: random.Random
    held: list[asyncio.StreamWriter] = field(default_factory=list)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection from this client's address."""
        return await asyncio.open_connection("127.0.0.1", self.port, local_addr=(f"127.0.1.{self.number + 1}", 0))

    async def send(self, data: bytes, *, waits: bool = True, holds: bool = False) -> bytes:
        """Send and return the beginning of the answer; `holds` leaves the connection open."""
        reader, writer = await self.open()
        try:
            writer.write(data)
            async with asyncio.timeout(ANSWER_S):
                await writer.drain()
                return await reader.read(4096) if waits else b""
        finally:
            if holds and len(self.held) < MAX_HELD:
                self.held.append(writer)
            else:
                writer.close()

    async def post(self, path: str, body: dict[str, Any], **options: bool) -> bytes:
        return await self.send(post(path, json.dumps(body).encode()), **options)


def post(path: str, body: bytes, num_declared: int | None = None, field: str = "") -> bytes:
    """A request; `num_declared` is its length where not all of the body is sent, `field` one more line of its head."""
    size = len(body) if num_declared is None else num_declared
    head = f"POST {path} HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n"
    head += f"{field}\r\n\r\n" if field else "\r\n"
    return head.encode() + body


async def health(client: Attacker) -> None:
    await client.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")


async def user(client: Attacker) -> None:
    body = {"inputs": f"def f{client.draw.randrange(1000)}(", "parameters": {"max_new_tokens": 16}}
    await client.post("/generate", body)


async def pipelined(client: Attacker) -> None:
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 1500, "ignore_eos_token": True}}
    both = post("/generate", json.dumps(body).encode()) + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    await client.send(both, waits=False)


async def large_head(client: Attacker) -> None:
    head = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
    fields = b"x: " + b"a" * (4 * MIB) if client.draw.random() < 0.5 else b"a: b\r\n" * (MIB // 2)
    await client.send(head + fields + b"\r\n\r\n")


async def long_prompt(client: Attacker) -> None:
    text = client.draw.choice(["a ", "\n", "aaaa", "é"]) * MIB
    path = client.draw.choice(["/generate", "/tokenize", "/v1/completions", "/v1/chat/completions"])
    body: dict[str, Any] = {
        "inputs": text,
        "model": "",
        "prompt": text,
        "messages": [{"role": "user", "content": text}],
    }
    wanted = {"/generate": ("inputs",), "/tokenize": ("inputs",), "/v1/completions": ("model", "prompt")}
    await client.post(path, {name: body[name] for name in wanted.get(path, ("model", "messages"))})


async def long_token(client: Attacker) -> None:
    token = client.draw.choice(["t" * (5 * MIB), "t" * 100_000, "tökén", "a\r\nb"])
    await client.post("/generate", {"inputs": "Hi", "parameters": {**local("public"), "api_token": token}})


async def leave(client: Attacker) -> None:
    name = f"fresh-{client.draw.randrange(NUM_FRESH)}"
    await client.post("/generate", {"inputs": "Hi", "parameters": local(name)}, waits=False)


async def many_elements(client: Attacker) -> None:
    ones = b",".join([b"1"] * (2 * MIB))
    bodies = {
        "/generate": b'{"inputs":"x","parameters":{"merged_adapters":{"ids":["a"],"weights":[' + ones + b"]}}}",
        "/v1/completions": b'{"model":"","prompt":[' + b",".join([b"[0]"] * MIB) + b"]}",
    }
    path = client.draw.choice(list(bodies))
    await client.send(post(path, bodies[path]))


async def large_template(client: Attacker) -> None:
    await chat(client, "large")


async def looping_template(client: Attacker) -> None:
    await chat(client, "loop")


async def many_sequences(client: Attacker) -> None:
    body = {"model": "", "prompt": ["Hi"] * 8, "n": 128, "max_tokens": 500, "ignore_eos_token": True, "temperature": 1}
    await client.post("/v1/completions", body)


async def unread_alternatives(client: Attacker) -> None:
    """A stream with many details that nobody reads."""
    fields = {"max_new_tokens": 1500, "ignore_eos_token": True, "return_k_alternatives": 200, "details": True}
    await client.post("/generate_stream", {"inputs": "Hi", "parameters": fields}, waits=False, holds=True)


async def resumable(client: Attacker) -> None:
    """A stream that goes on for a minute without its client."""
    fields = {"max_new_tokens": 1500, "ignore_eos_token": True, "return_k_alternatives": 20, "details": True}
    body = json.dumps({"inputs": "Hi", "parameters": fields}).encode()
    await client.send(post("/generate_stream", body, field="x-lorikeet-resumable: 60"), waits=False)


async def many_choices(client: Attacker) -> None:
    """As many sequences as one request may have, for as long as they may be."""
    body = {"model": "", "prompt": "Hi", "n": 128, "max_tokens": 1500, "ignore_eos": True, "temperature": 1}
    await client.post("/v1/completions", body)


async def many_connections(client: Attacker) -> None:
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 1500, "ignore_eos_token": True}}
    await client.post("/generate_stream", body, waits=False, holds=True)


async def echo(client: Attacker) -> None:
    """Log probabilities and alternatives of many prompts."""
    prompts = [f"def f{client.draw.randrange(10**6)}(a, b):\n    return a\n" * 16 for _ in range(64)]
    await client.post("/v1/completions", {"model": "", "prompt": prompts, "echo": True, "logprobs": 5, "max_tokens": 1})


async def ambiguous_grammar(client: Attacker) -> None:
    """Every prefix of the output can be read in very many ways."""
    grammar = 'start: e\ne: e e | e "a" e | "a" | "b" | ""\n' + f"// {client.draw.random()}"
    body = {"model": "", "prompt": "Hi", "max_tokens": 500, "guided_grammar": grammar, "temperature": 1}
    await client.post("/v1/completions", body)


async def health_generate(client: Attacker) -> None:
    await client.send(b"GET /health_generate HTTP/1.1\r\nhost: localhost\r\n\r\n")


async def small_chunks(client: Attacker) -> None:
    fields = b"host: [::1]\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    chunk = b"1\r\n \r\n" * 500_000 if client.draw.random() < 0.5 else (b"1;a=" + b"b" * 60_000 + b"\r\n \r\n") * 50
    await client.send(b"POST /generate HTTP/1.1\r\n" + fields + chunk)


async def unknown_adapters(client: Attacker) -> None:
    """Bodies that are large, for names that do not exist."""
    name = f"missing-{client.draw.randrange(10**9)}"
    await client.post("/generate", {"inputs": "a " * (MIB // 2), "parameters": local(name)})


async def bombs(client: Attacker) -> None:
    """Files that claim to hold more than any memory, or that take long to unpickle."""
    await client.post("/generate", {"inputs": "Hi", "parameters": local(f"bomb-{client.draw.randrange(NUM_BOMBS)}")})


async def merges(client: Attacker) -> None:
    """Merges that nobody has asked for before."""
    weights = [client.draw.random() for _ in range(2)]
    parameters = {
        "merged_adapters": {"ids": ["public", "fresh-0"], "weights": weights, "merge_strategy": "ties", "density": 0.5},
        "adapter_source": "local",
        "max_new_tokens": 4,
    }
    await client.post("/generate", {"inputs": "Hi", "parameters": parameters})


async def large_listing(client: Attacker) -> None:
    """A repository of very many files, at another revision each time."""
    name = f"evil/files@{client.draw.randrange(10**9)}"
    parameters = {"adapter_id": name, "adapter_source": "hub", "max_new_tokens": 4}
    await client.post("/generate", {"inputs": "Hi", "parameters": parameters})


async def answer_as_hub(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The description of a repository of 300 000 files."""
    files = b"".join(b'{"rfilename":"file-%06d","size":1},' % number for number in range(1000))
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n")
        writer.write(b'{"id":"evil/files","sha":"' + b"a" * 40 + b'","siblings":[')
        for _ in range(300):
            writer.write(files)
            await writer.drain()
    writer.close()


async def second_router(client: Attacker) -> None:
    """Ten thousand requests to the shard of another router."""
    neutral = pb.Sampling(temperature=1, top_p=1, typical_p=1, repetition_penalty=1)

    async def commands() -> AsyncIterator[pb.Command]:
        for first in range(0, 10_000, 500):
            numbers = range(first + 1, first + 501)
            ids = [100 + client.draw.randrange(100) for _ in range(8)]
            yield pb.Command(
                submits=[
                    pb.Submit(id=number, prompt_ids=ids, max_new_tokens=500, seed=number, sampling=neutral)
                    for number in numbers
                ]
            )
            await asyncio.sleep(0)
        await asyncio.sleep(5)

    async with grpc.aio.insecure_channel(os.environ[SHARD]) as channel:
        with contextlib.suppress(grpc.RpcError):
            async for _ in shard_pb2_grpc.ShardStub(channel).Serve(commands()):
                pass


async def unfinished(client: Attacker) -> None:
    if client.draw.random() < 0.5:
        await client.send(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ", waits=False, holds=True)
    else:
        await client.send(post("/generate", b" " * (4 * MIB), 8 * MIB), waits=False, holds=True)


async def chat(client: Attacker, name: str) -> None:
    body = {"model": name, "adapter_source": "local", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    await client.post("/v1/chat/completions", body)


def local(name: str) -> dict[str, Any]:
    return {"adapter_id": name, "adapter_source": "local", "max_new_tokens": 4}


@dataclass(frozen=True)
class Attack:
    once: Callable[[Attacker], Awaitable[None]]
    interval_s: float
    """Between two attacks of one attacker."""
    peer: str = "health"
    """What the canary next to the attack is compared with."""
    loads: bool = False
    """Whether the canary asks for adapters that were never loaded, too."""


ATTACKS = {
    "pipelined": Attack(pipelined, 0.1, "users"),
    "large-head": Attack(large_head, 0.5),
    "long-prompt": Attack(long_prompt, 2.0),
    "long-token": Attack(long_token, 1.0),
    "leave": Attack(leave, 0.5, "users"),
    "many-elements": Attack(many_elements, 2.0),
    "large-template": Attack(large_template, 1.0),
    "looping-template": Attack(looping_template, 1.0),
    "many-sequences": Attack(many_sequences, 1.0, "users"),
    "unfinished": Attack(unfinished, 0.25),
    "unread-alternatives": Attack(unread_alternatives, 1.0, "users"),
    "resumable": Attack(resumable, 1.0, "users"),
    "many-choices": Attack(many_choices, 1.0, "users"),
    "many-connections": Attack(many_connections, 0.25, "users"),
    "echo": Attack(echo, 1.0, "users"),
    "ambiguous-grammar": Attack(ambiguous_grammar, 1.0, "users"),
    "health-generate": Attack(health_generate, 0.01, "users"),
    "small-chunks": Attack(small_chunks, 1.0),
    "unknown-adapters": Attack(unknown_adapters, 0.25),
    "bombs": Attack(bombs, 0.5, loads=True),
    "merges": Attack(merges, 0.25, "users", loads=True),
    "large-listing": Attack(large_listing, 0.5),
    "second-router": Attack(second_router, 5.0, "users"),
}


async def any_attack(client: Attacker) -> None:
    """One of all, in turn at random."""
    await client.draw.choice(list(ATTACKS.values())[:-1]).once(client)


ATTACKS["all"] = Attack(any_attack, 0.25, "users")
PEERS = {"health": health, "users": user}


def write_adapters(folder: Path) -> None:
    """The local adapters that attacks name."""
    source = ROOT / "demo" / "adapters" / "record"
    names = ["public", "large", "loop", *(f"fresh-{number}" for number in range(NUM_FRESH))]
    for name in names:
        shutil.copytree(source, folder / name)
    entries = ",".join([f'"{number}":0' for number in range(2 * MIB)])
    values = json.loads((source / "adapter_config.json").read_text())
    for number in range(NUM_BOMBS):
        (folder / f"bomb-{number}").mkdir()
        shutil.copy(source / "adapter_config.json", folder / f"bomb-{number}")
        bomb = dict.fromkeys(range(1_000_000)) if number % 2 else [_Zeros(1 << 33)]
        (folder / f"bomb-{number}" / "adapter_model.bin").write_bytes(_saved(bomb, number % 4 < 2))
    loading = [name for name, attack in ATTACKS.items() if attack.loads]
    names = [f"{peer}{name}-{number}" for name in loading for peer in ("", "peer-") for number in range(NUM_CANARIES)]
    for alpha, name in enumerate(names, start=1):
        (folder / f"canary-{name}").mkdir()
        weights = "adapter_model.safetensors"
        os.link(folder / "public" / weights, folder / f"canary-{name}" / weights)
        (folder / f"canary-{name}" / "adapter_config.json").write_text(json.dumps(values | {"lora_alpha": alpha}))
    (folder / "large" / "tokenizer_config.json").write_text("{" + entries + "}")
    (folder / "loop" / "tokenizer_config.json").write_text(json.dumps({"chat_template": LOOP}))


class _Zeros:
    """So many bytes once it is unpickled."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return bytearray, (self.num_bytes,)


def _saved(value: object, is_zip: bool) -> bytes:
    import torch  # the attackers need none of it

    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=is_zip)
    return file.getvalue()


async def attack(port: int, name: str, seconds: float, peer: str = "") -> int:
    """Run it; returns how often it was begun."""
    chosen = ATTACKS[name]
    once, end = PEERS[peer] if peer else chosen.once, time.monotonic() + seconds

    count = 0

    async def repeat(number: int) -> None:
        nonlocal count
        client = Attacker(port, number, random.Random(number))
        await asyncio.sleep(chosen.interval_s * number / NUM_ATTACKERS)
        while time.monotonic() < end:
            next_at = time.monotonic() + chosen.interval_s
            count += 1
            with contextlib.suppress(OSError, TimeoutError):
                await once(client)
            await asyncio.sleep(max(0.0, min(next_at, end) - time.monotonic()))
        for writer in client.held:
            writer.close()

    hub = await asyncio.start_server(answer_as_hub, "127.0.0.1", int(os.environ[HUB_PORT]))
    async with hub:
        attacking = asyncio.gather(*map(repeat, range(NUM_ATTACKERS)))
        input_ended = asyncio.create_task(asyncio.to_thread(sys.stdin.buffer.read))
        await asyncio.wait({attacking, input_ended}, return_when=asyncio.FIRST_COMPLETED)
        attacking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await attacking
    return count


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("attack", choices=ATTACKS)
    parser.add_argument("seconds", type=float)
    parser.add_argument("peer", nargs="?", default="", choices=["", *PEERS])
    given = parser.parse_args()
    print(asyncio.run(attack(given.port, given.attack, given.seconds, given.peer)))
