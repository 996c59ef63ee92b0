"""What a decode step launches, counted without a device: a model with fused modules on `meta`, operators by a dispatch
mode, Triton kernels where they would be launched. No operator of ours counts as one: its launches do.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.cuda.setup import LlamaShape
from lorikeet.proto.params import LogprobParams, SamplingParams
from lorikeet.shard.attention.paged import PagedAttention
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.padding import Bounds, Padding
from lorikeet.shard.batch.transfer import HostCopy
from lorikeet.shard.engine.engine import Engine, LoopConfig
from lorikeet.shard.grpc.streams import Commands, Inbox, Outbox, StreamOpened
from lorikeet.shard.model import Model, layers
from lorikeet.shard.model.attention_binding import NAME
from lorikeet.shard.model.build import assemble
from lorikeet.shard.model.fusion import layer, parts, verify
from lorikeet.shard.model.graphs import Launch
from lorikeet.shard.model.kernels.device_integers import DeviceIntegers
from lorikeet.shard.sampling import Sampler, plan
from lorikeet.shard.sampling.device import Tile
from lorikeet.shard.scheduler.budget import Limits
from lorikeet.shard.scheduler.kv_cache import KvCache
from lorikeet.shard.scheduler.scheduler import Scheduler
from lorikeet.shard.system import gpu
from tests.cuda.launches import recorded
from tests.shard.engine.test_on_a_device import begun, waited
from tests.shard.rig import EPOCH, make_request

META = torch.device("meta")
PAGE, MOST_TOKENS, NUM_SLOTS = 64, 4096, 64
PROCESSORS = 132
"""Multiprocessors of an H100."""
FREE = ("empty", "new_empty", "_unsafe_view", "_reshape_alias", "lift_fresh", "detach", "alias", "view", "expand")
"""Operators that launch nothing, in addition to views."""


@dataclass(frozen=True)
class Count:
    """Launches, and bytes that they read and write."""

    launches: int
    bytes: int


class Counter(TorchDispatchMode):
    """Counts what PyTorch's operators launch and move: their whole arguments and results. A row selection reads as much
    as it writes.
    """

    launches = bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name.startswith(FREE):
            return result
        self.launches += 1
        found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if name in ("embedding", "index_select", "gather", "index"):
            found *= 2
        else:
            found += [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.bytes += sum(leaf.numel() * leaf.element_size() for leaf in found)
        return result


@contextmanager
def counting() -> Iterator[list[Count]]:
    """Appends what was launched inside to the list. Bytes of Triton's launches are not counted."""
    counts: list[Count] = []
    with recorded() as found, Counter() as mode:
        yield counts
    counts.append(Count(mode.launches + len(found.launches), mode.bytes))


@contextmanager
def without_values() -> Iterator[None]:
    """Modules are fused without being compared: on this device there are no values, nor addresses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "norm_differences", lambda *_: torch.zeros(1))
        patch.setattr(verify, "close", lambda *_: True)
        patch.setattr(parts, "_is_tanh", lambda _: False)
        patch.setattr(DeviceIntegers, "_is_exact", lambda _: False)
        patch.setattr(layer, "_agrees", lambda *_: True)
        patch.setattr(gpu, "num_processors", lambda _: PROCESSORS)
        patch.setattr(layers, "_shared_weights", lambda _: set())
        patch.setattr(gpu, "has_triton", lambda _: True)
        patch.setitem(plan._CHUNK_ELEMENTS, "meta", plan._CHUNK_ELEMENTS["cuda"])  # type: ignore[index]
        yield


@dataclass
class Outside(TorchDispatchMode):
    """Counts what a step does outside its graph: copies to the device, other operators on it, and copies back."""

    to_device: int = 0
    operators: int = 0
    to_host: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found, given = (
            {leaf.device for leaf in tree_leaves(each) if isinstance(leaf, torch.Tensor) and leaf.numel()}
            for each in (result, (args, kwargs))
        )
        if META in found and torch.device("cpu") in given:
            self.to_device += 1
        elif META in found and not (func.is_view or func.overloadpacket.__name__.startswith(FREE)):
            self.operators += 1
        return result


def model_of(shape: LlamaShape, has_adapters: bool) -> Model:
    """The model with attention by the paged kernel."""
    config = LlamaConfig(**shape.config(), head_dim=shape.head_dim)
    with META:
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=NAME).eval()
    with recorded():
        inputs = StepInputs(PAGE, META)
        model = assemble(network, config, PagedAttention(PAGE), torch.bfloat16, inputs, MOST_TOKENS)
        model.allocate_kv(32)
        if has_adapters:
            model.allocate_adapters(NUM_SLOTS)
            model.enable_device_kernels(NUM_SLOTS, 512, 512)
    return model


class CountingRecorder:
    """Counts what a captured step launches."""

    counts: Count

    def __call__(self, compute: Launch) -> Launch:
        with counting() as counts:
            compute()
        self.counts = counts[0]
        return compute


@torch.inference_mode()
def count_graph(model: Model, batch: int, has_adapters: bool) -> Count:
    """Counts of the captured part of a decode step, which samples."""
    inputs, recorder = model.inputs, CountingRecorder()
    sampler = Sampler(model.info.vocab_size, batch, META, tile=Tile())
    inputs.device_tokens, inputs.graph_sampling = sampler.device_tokens, sampler.in_graph
    padding = Padding(256, MOST_TOKENS, spare_page=0, has_adapters=has_adapters)
    bounds = padding.fit(batch, batch, 0, has_adapters)
    assert bounds is not None and bounds.num_rows == batch
    model.capture(padding, recorder, [bounds])
    model.drop_graphs()
    return recorder.counts


@torch.inference_mode()
def count_sampling(vocab_size: int, params: Sequence[SamplingParams]) -> Count:
    """Counts of sampling one token for each request."""
    sampler = Sampler(vocab_size, len(params), META, tile=Tile())
    for row, each in enumerate(params):
        sampler.add(row, each, LogprobParams(), [1, 2], 2)
    rows = list(range(len(params)))
    logits = torch.empty(len(params), vocab_size, device=META)
    with recorded():
        sampler.sample(logits, rows, [2] * len(rows))  # the plan is made once for the same rows
    with pytest.MonkeyPatch.context() as patch, counting() as counts:
        patch.setattr(HostCopy, "__init__", begun)
        sampler.sample(logits, rows, [3] * len(rows))
    return counts[0]


@contextmanager
def stepping(model: Model, batch: int, has_adapters: bool, logprobs: LogprobParams | None = None) -> Iterator[Engine]:
    """An engine that decodes one token of each of `batch` greedy requests in every step, padded and with commit lag 1.
    Graphs are replaced by their results.
    """
    inputs, vocab_size = model.inputs, model.info.vocab_size
    sampler = Sampler(vocab_size, batch, META, tile=Tile())
    inputs.device_tokens, inputs.graph_sampling = sampler.device_tokens, sampler.in_graph
    inputs.pad(Padding(256, MOST_TOKENS, spare_page=0, has_adapters=has_adapters))

    def replay(bounds: Bounds) -> torch.Tensor:
        return torch.empty(bounds.num_logits, vocab_size, device=META)

    scheduler = Scheduler(KvCache(4 * batch, PAGE), Limits(MOST_TOKENS, batch))
    inbox, outbox = Inbox(), Outbox()
    engine = Engine(model, sampler, scheduler, (inbox, outbox), LoopConfig(commit_lag=1))
    outbox.open(EPOCH, wake=lambda: None)
    inbox.put(StreamOpened(EPOCH))
    wanted = logprobs or LogprobParams()
    inbox.put(Commands(EPOCH, submits=[make_request(at, [1, 2, 3], 60, logprobs=wanted) for at in range(batch)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostCopy, "__init__", begun)
        patch.setattr(HostCopy, "wait", waited)
        patch.setattr(model, "graphs", cast(Any, SimpleNamespace(replay=replay)))
        with recorded():
            engine.step()
            for request in scheduler.running:
                request.slot = 0 if has_adapters else -1
            engine.step()
        yield engine
        inputs.pad(None)


def count_outside(
    model: Model, batch: int, has_adapters: bool, logprobs: LogprobParams | None = None
) -> tuple[Outside, int]:
    """What a decode step does outside its graph, and the number of Triton's launches there."""
    with stepping(model, batch, has_adapters, logprobs) as engine, pytest.MonkeyPatch.context() as patch:
        with recorded() as found, Outside() as outside:

            def start(copy: HostCopy, *tensors: torch.Tensor) -> None:
                outside.to_host += bool(tensors)
                begun(copy, *tensors)

            patch.setattr(HostCopy, "__init__", start)
            engine.step()
        bounds = model.inputs.bounds
        assert bounds is not None and (bounds.num_rows, bounds.has_adapters) == (batch, has_adapters)
    return outside, len(found.launches)
