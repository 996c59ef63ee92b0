"""Attackers at fixed rates, as a process of its own: `python -m tests.attacks.attackers PORT ATTACK SECONDS [PEER]`.

Eight clients, each with an address of its own, repeat one attack. With PEER they do something harmless at the same rate
instead: `health` sends GET /health, `users` are ordinary users who generate short texts.

No attack begins after SECONDS. Attacks that still wait for an answer are cancelled when the standard input ends. Prints
one line of JSON: how often attacks were begun, how many answers had each status, and answers that no attacker may get.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto import shard_pb2_grpc
from tests.attacks.hostile_adapters import BAD_NUMBERS, NUM_BOMBS, NUM_FRESH, SOURCE
from tests.attacks.hostile_hub import REPOSITORIES, RETRY_AFTER, answer_as_hub

NUM_ATTACKERS = 8
MAX_HELD = 50
"""Connections that one attacker holds open."""
MIB = 1 << 20
ANSWER_S = 20.0
"""How long an attacker waits for an answer."""
HUB_PORT, SHARD = "ATTACKED_HUB_PORT", "ATTACKED_SHARD"
"""Variables of the environment: the port of the hub that attackers serve, and the address of the server's shard."""
KEYS = {"owner": "secret owner", "other": "secret other", "root": "secret root"}
"""API keys of the server that has some. `root` is an administrator, and CLOSED an alias for `owner` alone."""
CLOSED = "closed-alias"
WORK = ("/health_generate", "/startup")
"""Paths where a GET makes the model work."""
HOSTILE_NAMES = ("a" * 100_000, "two\nlines", "a\u202eb", "tab\tname", "\u2066name", "")
"""Of aliases."""


@dataclass
class Attacker:
    """One client."""

    port: int
    number: int
    draw: random.Random
    address: str = ""
    """Without it, the client has one of its own."""
    count: int = 0
    """Attacks that were begun."""
    held: list[asyncio.StreamWriter] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """Answers that no attacker may get."""

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection from this client's address."""
        address = self.address or f"127.0.1.{self.number + 1}"
        return await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))

    async def send(
        self,
        data: bytes,
        *allowed: int,
        waits: bool = True,
        holds: bool = False,
        secret: bytes = b"",
    ) -> bytes:
        """Send and return the beginning of the answer; `holds` leaves the connection open. Wrong are answers with
        another status than those that are `allowed`, if some are, or with `secret`, for which all is read.
        """
        reader, writer = await self.open()
        try:
            writer.write(data)
            async with asyncio.timeout(ANSWER_S):
                await writer.drain()
                answer = await reader.read(-1 if secret else 4096) if waits else b""
            if answer:
                status = int(answer[9:12])
                self.statuses[status] += 1
                if (allowed and status not in allowed) or (secret and secret in answer):
                    self.wrong.append(f"{data[:200]!r}: {answer[:400]!r}")
            return answer
        finally:
            if holds and len(self.held) < MAX_HELD:
                self.held.append(writer)
            else:
                writer.close()

    async def post(
        self, path: str, body: dict[str, Any], *allowed: int, waits: bool = True, holds: bool = False
    ) -> bytes:
        return await self.send(post(path, json.dumps(body).encode()), *allowed, waits=waits, holds=holds)


def get(path: str, *fields: str, host: str = "localhost") -> bytes:
    """A request, after whose answer the connection closes; `fields` are further lines of its head."""
    return "\r\n".join([f"GET {path} HTTP/1.1", f"host: {host}", "connection: close", *fields, "", ""]).encode()


def post(path: str, body: bytes, num_declared: int | None = None, *fields: str, host: str = "[::1]") -> bytes:
    """A request; `num_declared` is its length where not all of the body is sent, `fields` further lines of its head."""
    size = len(body) if num_declared is None else num_declared
    head = [f"POST {path} HTTP/1.1", f"host: {host}", "content-type: application/json", f"content-length: {size}"]
    return "\r\n".join([*head, *fields, "", ""]).encode() + body


async def health(client: Attacker) -> None:
    await client.send(get("/health"))


async def user(client: Attacker) -> None:
    body = {"inputs": f"def f{client.draw.randrange(1000)}(", "parameters": {"max_new_tokens": 16}}
    await client.post("/generate", body)


async def pipelined(client: Attacker) -> None:
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 1500, "ignore_eos_token": True}}
    both = post("/generate", json.dumps(body).encode()) + get("/health")
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
    await client.send(post("/generate_stream", body, None, "x-lorikeet-resumable: 60"), waits=False)


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
    await client.send(get("/health_generate"))


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


async def wrong_hub(client: Attacker) -> None:
    """Repositories whose descriptions and headers break the protocol of the hub."""
    name = f"evil/{client.draw.choice(REPOSITORIES)}@r{client.draw.randrange(10**9)}"
    body = {"inputs": "Hi", "parameters": {"adapter_id": name, "adapter_source": "hub"}}
    await client.post("/generate", body, 503 if RETRY_AFTER in name else 502)


async def wrong_numbers(client: Attacker) -> None:
    """Adapters whose configurations hold numbers outside of any range."""
    name = f"number-{client.draw.randrange(len(BAD_NUMBERS))}"
    await client.post("/generate", {"inputs": "Hi", "parameters": local(name)}, 422)


async def web_pages(client: Attacker) -> None:
    """What a browser sends for a page of another site, and for one whose name resolves to this machine."""
    host = f"hostile.test:{client.port}"
    path = client.draw.choice(["/v1/models", "/metrics", "/info", *WORK])
    await client.send(get(path, host=host), 421)
    origin = f"origin: http://{host}"
    await client.send(get(path, origin), 403 if path in WORK else 200, secret=b"access-control-allow-origin")
    plain = {"inputs": "Hi", "parameters": {"max_new_tokens": 4}}
    from_hub = {"inputs": "Hi", "parameters": {"adapter_id": f"a/b{client.draw.random()}", "adapter_source": "hub"}}
    await client.send(post("/generate", json.dumps(plain).encode(), None, host=host), 421)
    await client.send(post("/generate", json.dumps(from_hub).encode(), None, origin), 403)


async def tried_keys(client: Attacker) -> None:
    """Wrong keys next to a valid key, in the one header or in the other."""
    wrong, own = f"wrong {client.draw.random()}", KEYS["other"]
    names = [wrong, own] if client.draw.random() < 0.5 else [own, wrong]
    await client.send(get("/v1/models", f"authorization: Bearer {names[0]}", f"x-api-key: {names[1]}"), 401, 429)


async def failed_keys(client: Attacker) -> None:
    """Wrong keys from the address of the canary."""
    await client.send(get("/v1/models", f"authorization: Bearer wrong {client.draw.random()}"), 401, 429)


async def closed_alias(client: Attacker) -> None:
    """Whatever lists names, with a key that may not see one of them."""
    key = f"authorization: Bearer {KEYS['other']}"
    for path in ("/metrics", "/v1/models", "/info", "/v1/capabilities"):
        await client.send(get(path, key), 200, secret=CLOSED.encode())
    body = {"inputs": "Hi", "parameters": {"adapter_id": CLOSED, "max_new_tokens": 4}}
    await client.send(post("/generate", json.dumps(body).encode(), None, key), 404)


async def hostile_names(client: Attacker) -> None:
    """Names of aliases that no list should show."""
    body = {"lora_name": client.draw.choice(HOSTILE_NAMES), "lora_path": str(SOURCE)}
    key = f"authorization: Bearer {KEYS['root']}"
    await client.send(post("/v1/load_lora_adapter", json.dumps(body).encode(), None, key), 400, 422)


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
    address: str = ""
    """The address of all attackers; without one, each has its own."""


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
    "web-pages": Attack(web_pages, 0.5),
    "wrong-hub": Attack(wrong_hub, 0.25),
    "wrong-numbers": Attack(wrong_numbers, 0.25),
}
"""On a server without keys."""
KEYED_ATTACKS = {
    "tried-keys": Attack(tried_keys, 0.1),
    "failed-keys": Attack(failed_keys, 0.1, address="127.0.0.1"),
    "closed-alias": Attack(closed_alias, 0.5),
    "hostile-names": Attack(hostile_names, 0.25),
}
"""On a server with KEYS."""
ALL = "all"
"""Every attack on a server without keys, each by one attacker, at once."""
PEERS, PEER_INTERVAL_S = {"health": health, "users": user}, 0.5


async def repeat(client: Attacker, attack: Attack, end: float) -> None:
    """Attack until `end`."""
    await asyncio.sleep(attack.interval_s * client.number / NUM_ATTACKERS)
    while time.monotonic() < end:
        next_at = time.monotonic() + attack.interval_s
        client.count += 1
        with contextlib.suppress(OSError, TimeoutError):
            await attack.once(client)
        await asyncio.sleep(max(0.0, min(next_at, end) - time.monotonic()))
    for writer in client.held:
        writer.close()


async def run(port: int, attacks: list[Attack], seconds: float) -> dict[str, Any]:
    """One client for each attack; returns what is printed."""
    clients = [
        (Attacker(port, number, random.Random(number), attack.address), attack) for number, attack in enumerate(attacks)
    ]
    end = time.monotonic() + seconds
    async with await asyncio.start_server(answer_as_hub, "127.0.0.1", int(os.environ[HUB_PORT])):
        attacking = asyncio.gather(*(repeat(client, attack, end) for client, attack in clients))
        input_ended = asyncio.create_task(asyncio.to_thread(sys.stdin.buffer.read))
        await asyncio.wait({attacking, input_ended}, return_when=asyncio.FIRST_COMPLETED)
        attacking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await attacking
    statuses = sum((client.statuses for client, _ in clients), Counter[int]())
    wrong = [text for client, _ in clients for text in client.wrong]
    return {"attacks": sum(client.count for client, _ in clients), "statuses": statuses, "wrong": wrong}


def chosen(name: str, peer: str) -> list[Attack]:
    """What each client does: the attack, or as many times what `peer` names."""
    every = ATTACKS | KEYED_ATTACKS
    attacks = list(ATTACKS.values()) if name == ALL else [every[name]] * NUM_ATTACKERS
    return [Attack(PEERS[peer], PEER_INTERVAL_S)] * len(attacks) if peer else attacks


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("attack", choices=[*ATTACKS, *KEYED_ATTACKS, ALL])
    parser.add_argument("seconds", type=float)
    parser.add_argument("peer", nargs="?", default="", choices=["", *PEERS])
    given = parser.parse_args()
    print(json.dumps(asyncio.run(run(given.port, chosen(given.attack, given.peer), given.seconds))))
