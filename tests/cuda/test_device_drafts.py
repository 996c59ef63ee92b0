"""Steps with drafts that the device makes, on a device without values: nothing reads a value or mixes host and device,
and what is launched outside the graph is limited. Lower a number when it falls; never raise one.
"""

import importlib.util
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from benchmarks.cuda.setup import LLAMA_8B
from lorikeet.proto.params import Method, Speculation
from lorikeet.shard.batch.padding import Bounds, Padding
from lorikeet.shard.batch.transfer import HostCopy
from lorikeet.shard.engine.engine import Engine, LoopConfig
from lorikeet.shard.grpc.streams import Commands, Inbox, Outbox, StreamOpened
from lorikeet.shard.sampling import Sampler
from lorikeet.shard.scheduler.budget import Limits
from lorikeet.shard.scheduler.kv_cache import KvCache
from lorikeet.shard.scheduler.scheduler import Scheduler
from lorikeet.shard.speculation.device.device_drafts import MOST_DRAFTS
from lorikeet.shard.speculation.drafter import DraftSettings
from tests.shard.engine.test_on_a_device import begun, waited
from tests.shard.rig import EPOCH, make_request

if TYPE_CHECKING or importlib.util.find_spec("triton") is not None:
    from lorikeet.shard.sampling.device import Tile
    from tests.cuda.decode_step import META, MOST_TOKENS, PAGE, Outside, model_of, without_values
    from tests.cuda.launches import recorded

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
WIDTH = 3
COPIES, LAUNCHES = 4, 10
"""To the device, and of operators and kernels, outside the graph of a step that verifies drafts after one that did."""


def found_match(values: torch.Tensor) -> torch.Tensor:
    """Reports of drafts say that there are further ones."""
    if values.ndim == 2 and values.shape[1] == MOST_DRAFTS + 1:
        values[:, MOST_DRAFTS] = 1
    return values


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_a_step_after_drafts_launches_no_more_than_before(batch: int) -> None:
    with without_values(), pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(HostCopy, "__init__", begun)
        patch.setattr(HostCopy, "wait", lambda copy: [found_match(values) for values in waited(copy)])
        model = model_of(replace(LLAMA_8B, layers=2), has_adapters=False)
        sampler = Sampler(model.info.vocab_size, batch, META, tile=Tile())
        inputs = model.inputs
        inputs.device_tokens, inputs.num_accepted = sampler.device_tokens, sampler.device_drafts.num_accepted
        inputs.pad(Padding(256, MOST_TOKENS, spare_page=0))

        def replay(bounds: Bounds) -> torch.Tensor:
            return torch.empty(bounds.num_logits, model.info.vocab_size, device=META)

        patch.setattr(model, "graphs", cast(Any, SimpleNamespace(replay=replay)))
        sources = DraftSettings(max_batch_size=64, most_on_device=MOST_DRAFTS)
        scheduler = Scheduler(KvCache(4 * batch, PAGE), Limits(MOST_TOKENS, batch), drafts=sources)
        inbox, outbox = Inbox(), Outbox()
        engine = Engine(model, sampler, scheduler, (inbox, outbox), LoopConfig(commit_lag=1))
        outbox.open(EPOCH, wake=lambda: None)
        inbox.put(StreamOpened(EPOCH))
        asked = [
            make_request(at, [1, 2, 1, 2], 60, speculation=Speculation(Method.LOOKUP, WIDTH)) for at in range(batch)
        ]
        inbox.put(Commands(EPOCH, submits=asked))
        with recorded() as found:
            for _ in range(4):
                engine.step()
            found.launches.clear()
            with Outside() as outside:
                engine.step()
        decode = engine._launched[0].plan.decode
        assert decode is not None and decode.widths.tolist() == [WIDTH] * batch
        assert set(inputs.num_uncertain[:batch].tolist()) == {WIDTH}
        print(f"{outside.to_device} copies, {outside.operators} operators, {len(found.launches)} kernels")
        assert outside.to_device <= COPIES
        assert outside.operators + len(found.launches) <= LAUNCHES
