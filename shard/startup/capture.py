"""Decides whether a shard's steps run as CUDA graphs, measures their memory, and captures them.

Their memory is measured before KV is sized. A first capture compiles kernels and lets libraries allocate their
workspaces; two trials on one page then give the memory of the first graph and of each further one.
"""

import gc
from copy import copy
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
class CapturePlan:
    """The graphs to capture of one model."""

    model: Model
    padding: Padding
    num_bytes: int
    """Estimated memory of all graphs."""
    is_required: bool = False
    """Whether the shard must not run without graphs."""

    def capture(self, spare_page: int) -> None:
        """Capture all graphs; padding rows write their KV to `spare_page`. Raises ValueError if graphs are required
        and cannot be captured.
        """
        device = self.model.info.device
        before = _free(device)
        padding = copy(self.padding)
        padding.spare_page = spare_page
        try:
            self.model.capture(padding, CudaRecorder(device), padding.all(), is_checked=True)
        except CannotCapture as failure:
            _run_without(self.model, str(failure), self.is_required)
            return
        graphs = self.model.graphs
        assert graphs is not None
        log.info(
            "graphs_captured",
            model_type=self.model.info.model_type,
            num_graphs=graphs.num_graphs,
            seconds=round(graphs.seconds, 1),
            bytes=before - _free(device),
            expected_bytes=self.num_bytes,
        )


def plan_capture(config: ShardConfig, model: Model, has_adapters: bool) -> CapturePlan | None:
    """The graphs to capture of a model whose adapter slots are allocated and whose KV has no pages, before or after.
    None if its steps run without graphs. Raises ValueError if graphs are required and cannot be captured.
    """
    if config.graphs is False or model.info.device.type != "cuda":
        return None
    model.allocate_kv(1)
    reason = model.graphs_unsupported_reason
    try:
        if not reason:
            return _measure(config, model, has_adapters)
    except CannotCapture as failure:
        reason = str(failure)
    finally:
        model.free_kv()
    _run_without(model, reason, is_required=bool(config.graphs))
    return None


def _run_without(model: Model, reason: str, is_required: bool) -> None:
    if is_required:
        raise ValueError(f"steps of {model.info.model_type} cannot run as CUDA graphs (--compile): {reason}")
    log.warning("graphs_unavailable", model_type=model.info.model_type, reason=reason)


def _measure(config: ShardConfig, model: Model, has_adapters: bool) -> CapturePlan:
    max_rows = min(config.graph_rows, config.step_tokens + config.max_running)
    has_sums = has_adapters and model.composed_slots.num_sums > 0
    padding = Padding(max_rows, config.max_total_tokens, 0, has_adapters, has_sums)
    num_graphs = len(padding.all())
    num_trial = min(TRIAL, num_graphs)
    _used(model, padding, 1)
    first, several = (_used(model, padding, count) for count in (1, num_trial))
    per_graph = max(0, several - first) // max(1, num_trial - 1)
    return CapturePlan(model, padding, first + per_graph * (num_graphs - 1), bool(config.graphs))


def _used(model: Model, padding: Padding, count: int) -> int:
    """Device memory of the first `count` graphs, in bytes."""
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
