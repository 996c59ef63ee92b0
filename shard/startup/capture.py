"""Whether the steps of a shard are computed by graphs, how much memory these take, and when they are captured.

Their memory is measured before KV is sized: after one that compiles kernels and lets libraries take what they keep, two
trials on one page say what the first graph takes and what each one more does.
"""

import gc
from dataclasses import dataclass

import structlog
import torch

from lorikeet.shard.batch.padding import Padding
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import Model
from lorikeet.shard.model.graphs import CannotCapture, CudaRecorder

log = structlog.get_logger()

TRIAL = 3
"""Graphs of the longer trial."""


@dataclass(frozen=True)
class Captured:
    """What is to be captured of one model."""

    model: Model
    most_rows: int
    max_kv_len: int
    has_adapters: bool
    num_bytes: int
    """That all graphs should take."""
    is_asked: bool = False
    """Whether there is to be no shard without."""

    def capture(self, spare_page: int) -> None:
        """Capture all; the KV of padding goes to `spare_page`. Raises ValueError where that was asked for and cannot
        be.
        """
        device = self.model.info.device
        before = _free(device)
        padding = Padding(self.most_rows, self.max_kv_len, spare_page, self.has_adapters)
        try:
            self.model.capture(padding, CudaRecorder(device), padding.all(), is_checked=True)
        except CannotCapture as failure:
            _go_without(self.model, str(failure), self.is_asked)
            return
        graphs = self.model.graphs
        assert graphs is not None
        log.info(
            "graphs captured",
            model_type=self.model.info.model_type,
            num_graphs=graphs.num_graphs,
            seconds=round(graphs.seconds, 1),
            bytes=before - _free(device),
            expected_bytes=self.num_bytes,
        )


def plan_capture(config: ShardConfig, model: Model, has_adapters: bool) -> Captured | None:
    """What is to be captured of a model whose adapters have their tables already; its KV has no pages before or after.
    None where steps are launched one by one. Raises ValueError where graphs were asked for and cannot be.
    """
    if config.graphs is False or model.info.device.type != "cuda":
        return None
    model.allocate_kv(1)
    reason = model.graphs_unsupported_reason
    if not reason and config.num_ranks > 1 and config.graphs is None:
        reason = "the model is split over several devices, whose sums are captured only with --compile"
    try:
        if not reason:
            return _measure(config, model, has_adapters)
    except CannotCapture as failure:
        reason = str(failure)
    finally:
        model.free_kv()
    _go_without(model, reason, is_asked=bool(config.graphs))
    return None


def _go_without(model: Model, reason: str, is_asked: bool) -> None:
    if is_asked:
        raise ValueError(f"steps of {model.info.model_type} do not run as CUDA graphs (--compile): {reason}")
    log.warning("steps do not run as CUDA graphs", model_type=model.info.model_type, reason=reason)


def _measure(config: ShardConfig, model: Model, has_adapters: bool) -> Captured:
    most_rows = min(config.graph_rows, config.step_tokens + config.max_running)
    padding = Padding(most_rows, config.max_total_tokens, spare_page=0, has_adapters=has_adapters)
    every = padding.all()
    _used(model, padding, 1)
    used = [_used(model, padding, count) for count in (1, min(TRIAL, len(every)))]
    each = max(0, used[1] - used[0]) // max(1, min(TRIAL, len(every)) - 1)
    num_bytes = used[0] + each * (len(every) - 1)
    return Captured(model, most_rows, config.max_total_tokens, has_adapters, num_bytes, bool(config.graphs))


def _used(model: Model, padding: Padding, count: int) -> int:
    """Bytes of the device that the first so many graphs take."""
    device = model.info.device
    before = _free(device)
    model.capture(padding, CudaRecorder(device), padding.all()[:count])
    used = before - _free(device)
    model.drop_graphs()
    return used


def _free(device: torch.device) -> int:
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
