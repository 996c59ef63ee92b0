"""Medusa heads learned while serving: the embedded model, open loop at half of what it can generate, with learning and
without on the same requests in turn. The traffic switches from one task to another; then the learned heads are compared
with heads that are trained offline on the same texts of the new task.
"""

import asyncio
import contextlib
import itertools
import os
import random
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.evidence.figure import Case, Cases, Raw, percentile
from benchmarks.load import adapted, servers
from benchmarks.load.rounds import alone, in_turn
from lorikeet.launcher.bench.load import ConnectionPool, LoadGenerator, LoadResult, Lorax, Sample, Seen
from lorikeet.launcher.bench.workload import Planned
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


@dataclass(frozen=True)
class NumberedRequest(Planned):
    """A request whose number decides how it is sampled."""

    number: int = 0


class TokenIds(Lorax):
    """LoRAX's API. The text of an answer is its token ids, and every token has a time."""

    def body(self, planned: Planned) -> dict[str, Any]:
        assert isinstance(planned, NumberedRequest)
        body = super().body(planned)
        return body | {"parameters": body["parameters"] | _sampling(planned.number)}

    def _read(self, data: dict[str, Any], time_s: float, seen: Seen) -> None:
        super()._read(data, time_s, seen)
        if token := data.get("token"):
            seen.texts[-1] = f"{token['id']} "
            if token.get("skipped"):
                seen.token_times.append(time_s)


def token_ids(sample: Sample) -> list[int]:
    return [int(word) for word in sample.text.split()]


def token_seconds(sample: Sample) -> list[float]:
    """Seconds of each token after the first ones: the time since the tokens before. Those that arrive together have
    equal parts of it.
    """
    arrivals: list[tuple[float, int]] = []
    for gap in sample.itls:
        if gap:
            arrivals.append((gap, 1))
        elif arrivals:
            arrivals[-1] = (arrivals[-1][0], arrivals[-1][1] + 1)
    return [gap / count for gap, count in arrivals for _ in range(count)]


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
            warm_up, counted = (_requests(prompts, 1) for prompts in (others[:CLIENTS], others))
            uvloop.run(_load(running[OFF].port, warm_up, CLIENTS))
            loaded = uvloop.run(_load(running[OFF].port, counted, CLIENTS))
            rate = LOAD * len(loaded.samples) / loaded.duration
        raw["requests_per_second"] = rate
        texts: dict[str, list[Sample]] = {ON: [], OFF: []}
        seconds = {ON: 0.0, OFF: 0.0}
        prompts = first + second
        for number, start in enumerate(range(0, len(prompts), SEGMENT)):
            part = prompts[start : start + SEGMENT]
            arrivals = itertools.accumulate(random_.expovariate(rate) for _ in part)
            plan = _requests(part, start, arrivals)
            for way in in_turn((ON, OFF), number):
                with alone(way, running, errors):
                    loaded = uvloop.run(_load(running[way].port, plan))
                    texts[way] += loaded.samples
                    seconds[way] += loaded.duration
        for way in (ON, OFF):
            raw[way] = {
                "tokens_per_second": sum(sample.num_output for sample in texts[way]) / seconds[way],
                "p99_token_s": percentile([token_s for sample in texts[way] for token_s in token_seconds(sample)], 99),
                "seconds": seconds[way],
            }
        pairs = zip(texts[ON], texts[OFF], strict=True)
        raw["differing_texts"] = sum(on.text != off.text for on, off in pairs)
        raw["learning"] = uvloop.run(_learning(running[ON].port))
        with _offline([token_ids(sample) for sample in texts[ON][FIRST_REQUESTS:]], second, running) as folder:
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


def _sampling(number: int) -> dict[str, Any]:
    """One of SAMPLED_EVERY requests is sampled."""
    drawn = {"do_sample": True, "temperature": TEMPERATURE} if number % SAMPLED_EVERY == 0 else {}
    return {"seed": number, **drawn}


def _requests(prompts: Sequence[str], first: int, arrivals: Iterable[float] = ()) -> list[NumberedRequest]:
    """Requests from number `first` on, which arrive at these times, or all at once."""
    pairs = zip(enumerate(prompts, first), itertools.chain(arrivals, itertools.repeat(0.0)), strict=False)
    return [NumberedRequest(prompt, NUM_TOKENS, None, time_s, number) for (number, prompt), time_s in pairs]


async def _load(port: int, plan: Sequence[Planned], clients: int | None = None) -> LoadResult:
    """A closed loop of so many clients; without them an open loop. Raises RuntimeError if a request fails."""
    connections = ConnectionPool(f"http://127.0.0.1:{port}", {}, adapted.ANSWER_S)
    try:
        loaded = await LoadGenerator(connections, TokenIds("", {}, ignores_eos=True), clients).run(plan)
    finally:
        await connections.close()
    if errors := [sample.error for sample in loaded.samples if sample.error]:
        raise RuntimeError(errors[0])
    return loaded


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
            fixed = {"max_new_tokens": NUM_TOKENS, "ignore_eos_token": True, "seed": 1, "details": True}
            parameters = {**fixed, "speculative_schedule": "constant", **choice}
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
