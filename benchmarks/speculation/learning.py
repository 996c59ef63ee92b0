"""Medusa heads learned while serving: the embedded model, open loop at half of what it can generate, with learning and
without on the same requests in turn. The traffic switches from one task to another; then the learned heads are compared
with heads that are trained offline on the same texts of the new task.
"""

import asyncio
import contextlib
import json
import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.evidence.statistics import percentile
from benchmarks.load import adapted, servers
from benchmarks.load.rounds import alone, in_turn
from tests.oracles import family

ON, OFF = "on", "off"
FIRST_TASK, SECOND_TASK = "code", "citation"
NUM_TOKENS = 64
"""Output tokens of every text."""
FIRST_REQUESTS, SECOND_REQUESTS = 960, 3125
"""200 000 tokens of the second task."""
SEGMENT = 120
"""Requests after which the other server has its turn."""
LOAD = 0.5
"""Part of the capacity, which is measured first."""
CLIENTS = 16
SAMPLED_EVERY = 4
"""One of so many requests is sampled, at this temperature; the others are greedy."""
TEMPERATURE = 0.7
EVALUATED = 300


@dataclass
class Streamed:
    """One text as it arrived."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[tuple[float, int]] = field(default_factory=list)
    """When tokens arrived, and how many at once."""

    def token_seconds(self) -> list[float]:
        """Seconds of each token after the first ones: the time since the tokens before, in equal parts."""
        pairs = zip(self.pieces, self.pieces[1:], strict=False)
        return [(end - start) / count for (start, _), (end, count) in pairs for _ in range(count)]


def measure() -> Cases:
    """One case: the whole run."""
    random_ = random.Random(0)
    code = _prompts(FIRST_TASK, FIRST_REQUESTS + SEGMENT)
    first, others = code[:FIRST_REQUESTS], code[FIRST_REQUESTS:]
    second = _prompts(SECOND_TASK, SECOND_REQUESTS)
    raw: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    errors: list[str] = []
    with _both() as running:
        with alone(OFF, running, errors):
            rate = LOAD * uvloop.run(_capacity(running[OFF].port, others)) / NUM_TOKENS
        raw["requests_per_second"] = rate
        texts: dict[str, list[Streamed]] = {ON: [], OFF: []}
        seconds = {ON: 0.0, OFF: 0.0}
        prompts = first + second
        for number, start in enumerate(range(0, len(prompts), SEGMENT)):
            part = [(at, prompts[at]) for at in range(start, min(start + SEGMENT, len(prompts)))]
            offsets = [random_.expovariate(rate) for _ in part]
            for way in in_turn((ON, OFF), number):
                with alone(way, running, errors):
                    begun = time.monotonic()
                    texts[way] += uvloop.run(_open_loop(running[way].port, part, offsets))
                    seconds[way] += time.monotonic() - begun
        for way in (ON, OFF):
            raw[way] = {
                "tokens_per_second": sum(len(text.token_ids) for text in texts[way]) / seconds[way],
                "p99_token_s": percentile([token_s for text in texts[way] for token_s in text.token_seconds()], 99),
                "seconds": seconds[way],
            }
        pairs = zip(texts[ON], texts[OFF], strict=True)
        raw["differing_texts"] = sum(on.token_ids != off.token_ids for on, off in pairs)
        raw["learning"] = uvloop.run(_learning(running[ON].port))
        with _offline([text.token_ids for text in texts[ON][FIRST_REQUESTS:]], second, running) as folder:
            evaluated = _prompts(SECOND_TASK, SECOND_REQUESTS + EVALUATED)[SECOND_REQUESTS:]
            with alone(ON, running, errors):
                raw["tokens_per_step"] = uvloop.run(_evaluate(running[ON].port, evaluated, folder))
    yield Case("switch of traffic", raw, "; ".join(errors[:3]))


def over_offline(raw: Raw) -> float:
    """Tokens per step of the learned heads over those of the heads that were trained offline."""
    return float(raw["tokens_per_step"]["learned"] / raw["tokens_per_step"]["offline"])


def p99_ratio(raw: Raw) -> float:
    return float(raw[ON]["p99_token_s"] / raw[OFF]["p99_token_s"])


def trainer_share(raw: Raw) -> float:
    """Part of a processor that trainings got."""
    totals = raw["learning"]["totals"]
    return float(totals["cpu_seconds"] / totals["train_seconds"]) if totals["train_seconds"] else 0.0


@contextlib.contextmanager
def _both() -> Iterator[dict[str, servers.RunningServer]]:
    """Two servers with stores of their own, so that nothing is known from an earlier run."""
    folder = servers.LOGS.parent / "learning"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "heads").mkdir(parents=True)
    flags = {ON: ("--learn-heads",), OFF: ()}
    with contextlib.ExitStack() as stack:
        running = {}
        for way, flags_of_way in flags.items():
            files = ("--local-adapter-root", str(folder / "heads"), "--adapter-store", str(folder / way))
            room = ("--cpu-memory", "512MiB", "--dtype", "float32", "--default-adapter-source", "local")
            command = servers.lorikeet(family.BASE, *files, *room, *flags_of_way)
            command = replace(command, environment={**command.environment, "ADMIN_KEY": adapted.ADMIN_KEY})
            running[way] = stack.enter_context(servers.running(f"learning-{way}", command))
        yield running


def _prompts(task: str, count: int) -> list[str]:
    from lorikeet.demo.training import heads  # torch

    return heads.ALL["base" if task == FIRST_TASK else task].training_prompts(count, 0)[:count]


def _parameters(number: int) -> dict[str, Any]:
    fixed = {"max_new_tokens": NUM_TOKENS, "ignore_eos_token": True, "seed": number}
    return fixed | ({"do_sample": True, "temperature": TEMPERATURE} if number % SAMPLED_EVERY == 0 else {})


async def _stream(port: int, prompt: str, parameters: Mapping[str, Any]) -> Streamed:
    """Events are read apart from the clock: only their arrival is noted while they come."""
    content = json.dumps({"inputs": prompt, "parameters": parameters}).encode()
    head = f"POST /generate_stream HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    pieces: list[tuple[float, bytes]] = []
    try:
        writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
        while data := await reader.read(65536):
            pieces.append((time.monotonic(), data))
    finally:
        writer.close()
    text, rest = Streamed(), b""
    for time_s, data in pieces:
        *lines, rest = (rest + data).split(b"\n")
        events = [json.loads(line[5:]) for line in lines if line.startswith(b"data:")]
        ids = [event["token"]["id"] for event in events if event.get("token")]
        if ids:
            text.token_ids += ids
            text.pieces.append((time_s, len(ids)))
    if not text.token_ids:
        raise RuntimeError(f"no text: {pieces[:1]!r}"[:500])
    return text


async def _open_loop(port: int, part: Sequence[tuple[int, str]], offsets: Sequence[float]) -> list[Streamed]:
    """Requests that arrive whatever the server does."""
    running: list[asyncio.Task[Streamed]] = []
    due = time.monotonic()
    for (number, prompt), offset in zip(part, offsets, strict=True):
        due += offset
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        running.append(asyncio.create_task(_stream(port, prompt, _parameters(number))))
    return list(await asyncio.gather(*running))


async def _closed_loop(port: int, prompts: Sequence[str], clients: int, **parameters: Any) -> float:
    """Tokens per second."""
    waiting, count = iter(prompts), 0

    async def client() -> None:
        nonlocal count
        for prompt in waiting:
            text = await _stream(port, prompt, {**_parameters(1), **parameters})
            count += len(text.token_ids)  # `count += len(await …)` would read `count` before other clients add to it

    start = time.monotonic()
    await asyncio.gather(*(client() for _ in range(clients)))
    return count / (time.monotonic() - start)


async def _capacity(port: int, prompts: Sequence[str]) -> float:
    await _closed_loop(port, prompts[:CLIENTS], CLIENTS)  # warms up
    return await _closed_loop(port, prompts, CLIENTS)


async def _learning(port: int) -> dict[str, Any]:
    """What the server reports, without the names of pairs."""
    reply = await adapted.send(port, "/admin/learning", token=adapted.ADMIN_KEY)
    (shard,) = reply.json["shards"]
    decisions = [decision for pair in shard["pairs"] for decision in pair["decisions"]]
    return {"totals": shard["totals"], "trainer": shard["trainer"], "decisions": decisions}


async def _evaluate(port: int, prompts: Sequence[str], heads: Path) -> dict[str, float]:
    """Tokens per step with all drafts, by the server's own count."""
    rates = {}
    for name, choice in (("learned", {}), ("offline", {"heads_id": heads.name})):
        tokens = steps = 0
        for first in range(0, len(prompts), CLIENTS):
            parameters = {**_parameters(1), "details": True, "speculative_schedule": "constant", **choice}
            bodies = ({"inputs": prompt, "parameters": parameters} for prompt in prompts[first : first + CLIENTS])
            for reply in await asyncio.gather(*(adapted.send(port, "/generate", body) for body in bodies)):
                if reply.status != 200:
                    raise RuntimeError(f"{reply.status} {reply.body[:300]!r}")
                details = reply.json["details"]
                tokens += details["generated_tokens"]
                steps += details.get("speculation", {}).get("steps", details["generated_tokens"])
        rates[name] = tokens / steps
    return rates


@contextlib.contextmanager
def _offline(
    outputs: Sequence[list[int]], prompts: Sequence[str], running: Mapping[str, servers.RunningServer]
) -> Iterator[Path]:
    """Heads trained by `lorikeet-heads`' own code on these texts, while no server runs."""
    import torch

    from lorikeet.adapters.formats import heads as files
    from lorikeet.adapters.medusa.target import DevicePlacement, Target
    from lorikeet.adapters.medusa.texts import HiddenFiles, Text
    from lorikeet.adapters.medusa.training import HeadsRecipe, HeadsTrainer

    folder = servers.LOGS.parent / "learning"
    with contextlib.ExitStack() as stack:
        for server in running.values():
            stack.enter_context(server.frozen())
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        target = Target(str(family.BASE), None, DevicePlacement(torch.device("cpu"), torch.float32))
        pairs = zip(family.encode(prompts), outputs, strict=True)
        rows = HiddenFiles(
            folder / "rows", [Text(tuple(ids), tuple(output)) for ids, output in pairs], target.hidden_size, 0
        )
        rows.compute(target, {}, lambda done, of: None)
        trainer = HeadsTrainer(HeadsRecipe(bf16=False), rows, target)
        for _ in trainer.run():
            pass
        tensors = trainer.heads.tensors(torch.float32)
        files.write(folder / "heads" / "offline", files.HeadsFile(trainer.heads.shape, tensors, "demo"))
    yield folder / "heads" / "offline"
