"""The host's processor time of a steady step, of this checkout and of another one, in turn.

    python -m benchmarks.serving.host_time --other FOLDER [--cases greedy-256,drafts-256]

FOLDER is a checkout of an earlier commit. The engine's own loop decodes with commit lag 1 on a device that holds no
values; launches and copies do nothing. The outbox is taken and serialized after every step. Each number is the median
processor time of the whole process per step, so that other processes disturb it little; each case runs in processes of
its own, both checkouts alternately.
"""
# mypy: allow-untyped-calls

import gc
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.evidence import arguments

STEPS, WARM_UP, ROUNDS = 200, 8, 3
MAX_NEW_TOKENS = 2400
STEP_SECONDS = 0.01
"""Time of a step that the schedule `auto` gets, so that it always takes drafts."""
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class HostCase:
    """Requests of one kind, all running."""

    kind: str
    num_requests: int
    target_ms: float

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.num_requests}"

    @property
    def has_drafts(self) -> bool:
        return self.kind in (
            "drafts",
            "auto",
            "host",
            "heuristic",
            "paused",
            "heads",
            "device-heads",
            "draft-model",
            "history",
        )


CASES = (
    HostCase("greedy", 1, 0.4),
    HostCase("greedy", 64, 0.6),
    HostCase("greedy", 256, 1.3),
    HostCase("sampled", 1, 0.52),
    HostCase("sampled", 64, 0.78),
    HostCase("sampled", 256, 1.69),
    HostCase("drafts", 1, 0.8),
    HostCase("drafts", 64, 1.2),
    HostCase("drafts", 256, 2.0),
    HostCase("auto", 1, 0.8),
    HostCase("auto", 64, 1.2),
    HostCase("auto", 256, 2.0),
    HostCase("host", 1, 1.2),
    HostCase("host", 64, 3.0),
    HostCase("host", 256, 4.0),
    HostCase("heuristic", 64, 3.0),
    HostCase("heads", 1, 1.2),
    HostCase("heads", 64, 3.0),
    HostCase("heads", 256, 4.0),
    HostCase("device-heads", 64, 3.0),
    HostCase("history", 64, 3.0),
    HostCase("draft-model", 1, 3.0),
    HostCase("draft-model", 64, 5.0),
    HostCase("paused", 64, 0.6),
    HostCase("paused", 256, 1.3),
    HostCase("logprobs", 256, 2.5),
    HostCase("greedy", 1024, 3.0),
)
"""`sampled`: temperature, top-p and 64 different adapters; `drafts`: three drafts of prompt lookup for each request,
all accepted; `auto`: the same with the schedule `auto`; `host`: as `auto`, made by the host; `heuristic`: as `host`,
with that schedule; `heads`: as `host`, of Medusa heads; `device-heads`: as `auto`, of these; `history`: as `host`, from
earlier outputs; `draft-model`: as `host`, of a draft model, its passes included; `paused`: as `host`, where too many
requests run for drafts; `logprobs`: log probabilities of each token and of five alternatives, whose operators are not
launched: on a device without values each takes tens of microseconds of Python that a launch does not.
"""


def measured_ms(case: HostCase, num_steps: int = STEPS) -> float:
    """Median milliseconds of a step, of the checkout that is imported."""
    import pytest
    import torch
    from triton.runtime.jit import JITFunction

    from benchmarks.cuda.setup import LLAMA_8B
    from lorikeet.proto import process
    from lorikeet.proto import shard_pb2 as pb
    from lorikeet.proto.params import LogprobParams, Method, SamplingParams, Schedule, Speculation
    from lorikeet.shard.batch.padding import Padding
    from lorikeet.shard.batch.transfer import HostCopy
    from lorikeet.shard.engine.engine import Engine, LoopConfig
    from lorikeet.shard.grpc.codec import write_update
    from lorikeet.shard.grpc.streams import Commands, Inbox, Outbox, StreamOpened
    from lorikeet.shard.sampling import Sampler
    from lorikeet.shard.sampling.device import Tile
    from lorikeet.shard.scheduler.budget import Limits
    from lorikeet.shard.scheduler.kv_cache import KvCache
    from lorikeet.shard.scheduler.scheduler import Scheduler
    from lorikeet.shard.speculation.device.device_drafts import MOST_DRAFTS
    from lorikeet.shard.speculation.draft_network import DraftNetwork
    from lorikeet.shard.speculation.drafter import DraftSettings
    from lorikeet.shard.speculation.history_index import HistoryIndex
    from tests.cuda.decode_step import META, MOST_TOKENS, NUM_SLOTS, PAGE, model_of, without_values
    from tests.shard.engine.test_on_a_device import begun, waited
    from tests.shard.rig import EPOCH, make_request

    torch.set_num_threads(1)
    getattr(process, "keep_objects", gc.freeze)()  # as a shard of the checkout does
    batch, has_adapters = case.num_requests, case.kind == "sampled"
    takes_columns = (True,) if "takes_columns" in inspect.signature(write_update).parameters else ()
    with without_values(), pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        model = model_of(replace(LLAMA_8B, layers=1), has_adapters)
        inputs, vocab_size = model.inputs, model.info.vocab_size
        sampler = Sampler(vocab_size, batch, META, tile=Tile())
        inputs.device_tokens, inputs.graph_sampling = sampler.device_tokens, sampler.in_graph
        inputs.pad(Padding(256, MOST_TOKENS, spare_page=0, has_adapters=has_adapters))
        drafts = None
        if case.has_drafts:
            on_device, sources = case.kind in ("drafts", "auto", "device-heads"), dict[str, Any]()
            if case.kind == "history":
                sources = {"history": HistoryIndex(1 << 22), "ngram_max": 1, "ngram_long": 2}
                sources["history"].add(("one", ""), [0] * 100)
            most_running, has_draft_model = batch - (case.kind == "paused"), case.kind == "draft-model"
            drafts = DraftSettings(
                most_running, most_on_device=16 if on_device else 0, has_draft_model=has_draft_model, **sources
            )
            inputs.num_accepted = sampler.device_drafts.num_accepted
        num_pages = batch * (MAX_NEW_TOKENS // PAGE + 2)
        scheduler = Scheduler(KvCache(num_pages, PAGE), Limits(2 * MOST_TOKENS, batch), drafts=drafts)
        inbox, outbox = Inbox(), Outbox()
        networks = [model]
        drafter = None
        if case.kind == "draft-model":
            networks.append(model_of(replace(LLAMA_8B, layers=1), has_adapters=False))
            networks[1].inputs.pad(Padding(256, MOST_TOKENS, spare_page=0, has_adapters=False))
            drafter = DraftNetwork(networks[1], sampler, vocab_size, vocab_size)
        engine = Engine(model, sampler, scheduler, (inbox, outbox), LoopConfig(commit_lag=1), drafter)
        outbox.open(EPOCH, wake=lambda: None)
        inbox.put(StreamOpened(EPOCH))
        fields: dict[str, Any] = {}
        if case.kind == "sampled":
            fields["sampling"] = SamplingParams(do_sample=True, temperature=0.8, top_p=0.9, seed=1)
        if case.has_drafts:
            schedule = {"drafts": Schedule.CONSTANT, "heuristic": Schedule.HEURISTIC}.get(case.kind, Schedule.AUTO)
            fields["speculation"] = Speculation(Method.LOOKUP, 3, schedule=schedule)
        if case.kind == "draft-model":
            fields["speculation"] = Speculation(Method.DRAFT, 3, schedule=Schedule.AUTO)
        if case.kind == "history":
            fields["tenant"] = "one"
        if case.kind.endswith("heads"):
            fields["speculation"] = Speculation(Method.MEDUSA, num_heads=3, schedule=Schedule.AUTO)
        if case.kind == "logprobs":
            fields["logprobs"] = LogprobParams(wanted=True, alternatives=5)
        requests = [make_request(number, [1, 2, 3], MAX_NEW_TOKENS, **fields) for number in range(batch)]
        inbox.put(Commands(EPOCH, submits=[*requests]))

        def compute(of: Any) -> torch.Tensor:
            return torch.empty(1, of.inputs.num_logits + 1, vocab_size, device=META)[0]

        def found_match(values: torch.Tensor) -> torch.Tensor:
            if case.has_drafts and values.ndim == 2 and values.shape[1] == MOST_DRAFTS + 1:
                values[:, -1] = 8  # tokens of the match that the next drafts continue
            return values

        def replay(bounds: Any) -> torch.Tensor:
            return torch.empty(bounds.num_logits, vocab_size, device=META)

        patch.setattr(HostCopy, "__init__", begun)
        patch.setattr(HostCopy, "wait", lambda copy: [found_match(values) for values in waited(copy)])
        for network in networks:
            patch.setattr(network, "graphs", cast(Any, SimpleNamespace(replay=replay)))
            patch.setattr(network, "compute", partial(compute, network))
        patch.setattr(JITFunction, "run", lambda *_, **__: None)
        if case.has_drafts:
            lengths = scheduler.proposer.draft_length
            observe: Callable[..., None] = lengths.observe

            def observe_same(*given: Any) -> None:
                observe(*(STEP_SECONDS if isinstance(each, float) else each for each in given))

            patch.setattr(lengths, "observe", observe_same)
        if case.kind == "logprobs":
            patch.setattr(Sampler, "_sample_chunk", lambda *_: None)

        def step() -> None:
            engine.step()
            for message in write_update(outbox.take(EPOCH), pb.Heartbeat(), *takes_columns):
                message.SerializeToString()

        step()
        if has_adapters:  # as if they were in slots
            for number, request in enumerate(requests):
                request.slot = number % NUM_SLOTS
        for request in requests if case.kind.endswith("heads") else ():  # the same
            request.heads_slot, request.num_heads, request.drafts_on_device = 0, 3, case.kind == "device-heads"
        for _ in range(WARM_UP):
            step()
        times = []
        for _ in range(num_steps):
            began = time.process_time()
            step()
            times.append(time.process_time() - began)
        assert len(scheduler.running) == batch
    return 1000 * statistics.median(times)


def measured_in(folder: Path, case: HostCase) -> float:
    """The same in a process of its own, with the modules of a checkout."""
    environment = os.environ | {"PYTHONPATH": f"{folder / 'src'}:{folder}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--case", case.name]
    done = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE)
    return float(json.loads(done.stdout.decode().splitlines()[-1]))


def main() -> None:
    """One case of this checkout, or all of both."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--case", help="measure one case here, and print it as JSON")
    parser.add_argument("--cases", default="", help="names, all by default")
    parser.add_argument("--other", type=Path, metavar="FOLDER", help="another checkout")
    options = parser.parse_args()
    by_name = {case.name: case for case in CASES}
    if options.case:
        print(json.dumps(measured_ms(by_name[options.case])))
        return
    print("| requests | milliseconds a step | target | of the other checkout | ratio |\n|---|---|---|---|---|")
    for name in options.cases.split(",") if options.cases else by_name:
        folders = [ROOT, *([options.other.resolve()] if options.other else [])]
        rounds = [[measured_in(folder, by_name[name]) for folder in folders] for _ in range(ROUNDS)]
        here, *others = (statistics.median(values) for values in zip(*rounds, strict=True))
        compared = [f"{others[0]:.2f}", f"{others[0] / here:.1f}"] if others else ["–", "–"]
        print("|", " | ".join([name, f"{here:.2f}", f"≤ {by_name[name].target_ms:g}", *compared]), "|", flush=True)


if __name__ == "__main__":
    main()
