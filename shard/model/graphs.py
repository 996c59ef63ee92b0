"""Steps captured as CUDA graphs: one for each of the bounds that steps are padded to, replayed with one launch.

A graph is the launches of one forward pass, and of sampling after it, at fixed addresses. What differs from step to
step (tokens, positions, pages, each row's adapter, ranks, heads, and which rows are sampled) is read by the kernels
from memory that is refilled before each replay; so any mix of adapters, ranks and draft lengths is the same graph. All
graphs share their memory: one runs at a time.
shard/batch/padding.py decides how a step is padded.
"""

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import structlog
import torch

from lorikeet.shard.attention import AttentionBackend
from lorikeet.shard.batch.inputs import HeadsRow, StepInputs
from lorikeet.shard.batch.padding import DRAFTS_PER_ROW, Bounds, Padding
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.system import comparison

log = structlog.get_logger()

Launch = Callable[[], None]
Agree = Callable[[str], str]
"""Takes the reason why this rank cannot capture, "" for none; returns that of the first rank that cannot."""

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2.0**-7, torch.bfloat16: 2.0**-5}
"""Tolerance as a share of each logit and of its row's median: libraries may choose another kernel while a graph is
captured.
"""


class CannotCapture(RuntimeError):
    """The forward pass cannot be captured, or gives other logits when replayed."""


def sentence_of(error: Exception) -> str:
    """The type of an error, and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


Recorder = Callable[[Launch], Launch]
"""Runs a launch and returns a function that runs it again, on the memory at the same addresses. Raises CannotCapture
where it runs and cannot be captured."""


class CapturableModel(Protocol):
    """The parts of a model that graphs use. `Model` implements it, whose module imports this one."""

    inputs: StepInputs
    backend: AttentionBackend
    info: Any

    def compute(self) -> torch.Tensor: ...


class CudaRecorder:
    """torch's CUDA graphs, in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _side_stream(device)

    def __call__(self, compute: Launch) -> Launch:
        """Run `compute` once, so that kernels are compiled and libraries allocate, then capture it."""
        before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(before)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                compute()
            before.wait_stream(self._stream)
            try:
                # other threads may copy at the same time
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    compute()
            except Exception as error:
                raise CannotCapture(sentence_of(error)) from error
        finally:
            torch.cuda.set_stream(before)  # torch does not restore it where a capture fails
        return graph.replay


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Where steps are captured: always the same stream, because libraries allocate for each stream. Its kernels go
    before those that are captured next to them on streams of usual priority.
    """
    return torch.cuda.Stream(device, priority=-1)


class Graphs:
    """The captured steps of one model."""

    def __init__(
        self, model: CapturableModel, padding: Padding, recorder: Recorder, bounds: Sequence[Bounds],
        agree: Agree | None = None,
    ) -> None:  # fmt: skip
        """Captures one graph for each of `bounds`. The inputs must be padded already. Raises CannotCapture, on all of
        several ranks after the same graph.
        """
        started = time.monotonic()
        self._model, self._padding = model, padding
        most_logits = max(shape.num_logits for shape in bounds)
        # [most S + E, V] of the current step
        self._logits = torch.zeros(most_logits, model.info.vocab_size, device=model.info.device)
        self._launches: dict[Bounds, Launch] = {}
        self._agree = agree
        for shape in bounds:
            self._raise_agreed(self._try_capture(shape, recorder))
        self.num_graphs = len(self._launches)
        self.seconds = time.monotonic() - started

    def replay(self, bounds: Bounds) -> torch.Tensor:
        """Compute the step of inputs and backend. Returns [S + E, V] float32 of its bounds, valid until the next;
        undefined for the rows that the step samples.
        """
        self._launches[bounds]()
        return self._logits[: bounds.num_logits]

    def check(self) -> None:
        """Compare the largest graph of each family with the same launches outside a graph, for tokens that it was not
        captured with, and what it samples with its logits. Raises CannotCapture, on all of several ranks.
        """
        families = {
            (bool(shape.num_drafts), shape.has_adapters, shape.has_sums): shape for shape in reversed(self._launches)
        }
        for bounds in families.values():
            self._raise_agreed(self._check(bounds))

    def _check(self, bounds: Bounds) -> str:
        """What is wrong with a graph. Ranks that do not sample replay it as often."""
        self._describe(bounds, first_token=1)
        num_known = self._model.info.vocab_size - self._model.info.num_extra  # no row has the tokens of adapters
        logits = self.replay(bounds)[: bounds.num_wanted].clone()
        self._describe(bounds, first_token=1, is_sampled=True)
        self.replay(bounds)
        expected = self._model.compute()[: bounds.num_wanted].float()
        most, sizes = TOLERANCE[self._model.info.dtype], comparison.sizes_in_rows(expected[:, :num_known])
        off = ((logits - expected)[:, :num_known].abs() / sizes).max()
        if not bool(off <= most):
            return f"a step of {bounds} gives other logits when replayed: off by {float(off):.3g} of a logit's size"
        sampling = self._model.inputs.graph_sampling
        if sampling is None:
            return ""
        # no request has row 0 yet, so that it has no parameters: its tokens are those of the highest logits
        sampled = logits.gather(1, sampling.token_ids(bounds.num_wanted)[:, None])[:, 0]
        off = ((logits.amax(1) - sampled) / sizes.amin(1)).max()
        return (
            "" if bool(off <= most) else f"a step of {bounds} samples lower logits: by {float(off):.3g} of their size"
        )

    def _try_capture(self, bounds: Bounds, recorder: Recorder) -> str:
        """Capture; returns why it cannot be done. On one of several ranks every other error is raised: the step that
        comes first sums over the ranks, which would add other sums from then on.
        """
        try:
            self._launches[bounds] = self._capture(bounds, recorder)
        except CannotCapture as error:
            return f"a step of {bounds} cannot be captured: {error}"
        except Exception as error:
            if self._agree is not None:
                raise
            return f"a step of {bounds} cannot be captured: {sentence_of(error)}"
        return ""

    def _raise_agreed(self, reason: str) -> None:
        """Raise CannotCapture if this rank has a reason, or another one."""
        if reason := reason if self._agree is None else self._agree(reason):
            raise CannotCapture(reason)

    def _capture(self, bounds: Bounds, recorder: Recorder) -> Launch:
        self._describe(bounds)
        inputs, kept = self._model.inputs, self._logits[: bounds.num_logits]

        def compute() -> None:
            logits = self._model.compute()[: bounds.num_logits]
            if inputs.graph_sampling is None:
                kept.copy_(logits)
            else:
                inputs.graph_sampling.launch(logits, inputs.sampled_rows, inputs.next_positions, kept)

        return recorder(compute)

    def _describe(self, bounds: Bounds, first_token: int = 0, is_sampled: bool = False) -> None:
        """Describe a step of these bounds: requests of one token each in the spare page. Those at the same position of
        it have the same token, because on a device any of them may write its K and V last. With `is_sampled` tokens are
        sampled for row 0 of the device state.
        """
        inputs, num_rows = self._model.inputs, bounds.num_rows
        num_places = min(inputs.page_size, bounds.max_kv_len)
        slot = inputs.first_sum if bounds.has_sums else 0 if bounds.has_adapters else -1
        segments = [Segment(row % num_places, 1, (self._padding.spare_page,), slot) for row in range(num_rows)]
        heads = [HeadsRow(row, 0, DRAFTS_PER_ROW) for row in range(num_rows)] if bounds.num_drafts else []
        rows = torch.arange(num_rows)
        ids = (rows % num_places + first_token) % self._model.info.vocab_size
        sampled_rows = [0] * bounds.num_wanted if is_sampled else []
        inputs.fill(segments, ids, rows[: bounds.num_wanted], heads=heads, sampled_rows=sampled_rows)
        if inputs.bounds != bounds:
            raise CannotCapture(f"a step to be captured as {bounds} is {inputs.bounds}")
        self._model.backend.prepare(inputs)
        inputs.send()
