"""Each layer by the first of several backends that computes it, and that was seen to compute it rightly here.

A backend that says that it has all that a layer needs is tried on a few random rows before it is used: what it gives
must be what the reference gives. Knows nothing of how any of them computes.
"""

import logging
from collections.abc import Sequence

import torch

from lorikeet.shard.attention.base import AttentionBackend, AttentionSpec, LayerKV
from lorikeet.shard.attention.reference import ReferenceAttention
from lorikeet.shard.batch.inputs import Segment, StepInputs

logger = logging.getLogger(__name__)

TOLERANCE = 2.0**-5
"""Of values around one: rounding to bfloat16 moves them by a quarter of that at most."""


class PlacedKV(LayerKV):
    """K and V of one layer, and whose they are."""

    def __init__(self, owner: AttentionBackend, kv: LayerKV) -> None:
        self.owner, self.kv = owner, kv


class LayerwiseAttention(AttentionBackend):
    """Backends of one page size, the fastest first, the last one for everything."""

    def __init__(self, backends: Sequence[AttentionBackend]) -> None:
        self.page_size = backends[-1].page_size
        self.kv_dtype = backends[-1].kv_dtype
        self._backends = backends
        self._used: list[AttentionBackend] = []
        self._proved: dict[tuple[object, ...], str] = {}
        self._said: set[str] = set()

    @property
    def can_capture(self) -> bool:  # type: ignore[override]
        """Of the layers that there are."""
        return all(backend.can_capture for backend in self._used or self._backends[:1])

    def allocate(self, spec: AttentionSpec, num_pages: int, dtype: torch.dtype, device: torch.device) -> PlacedKV:
        *others, last = self._backends
        reasons: list[str] = []
        for backend in others:
            reason = backend.unsupported_reason(spec, dtype, device) or self.verify_backend(
                backend, spec, dtype, device
            )
            if not reason:
                return self._place(backend, spec, num_pages, dtype, device, reasons)
            reasons.append(reason)
        return self._place(last, spec, num_pages, dtype, device, reasons)

    def prepare(self, inputs: StepInputs) -> None:
        for backend in self._used:
            backend.prepare(inputs)

    def attend(
        self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(kv, PlacedKV)
        return kv.owner.attend(spec, kv.kv, query, key, value)

    def _place(
        self,
        owner: AttentionBackend,
        spec: AttentionSpec,
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
        reasons: Sequence[str],
    ) -> PlacedKV:
        if owner not in self._used:
            self._used.append(owner)
        if reasons and (said := "; ".join(reasons)) not in self._said:
            self._said.add(said)
            if isinstance(owner, ReferenceAttention):
                logger.warning("attention runs on the slow reference backend: %s", said)
            else:
                logger.info("attention runs on %s: %s", type(owner).__name__, said)
        return PlacedKV(owner, owner.allocate(spec, num_pages, dtype, device))

    def verify_backend(
        self, backend: AttentionBackend, spec: AttentionSpec, dtype: torch.dtype, device: torch.device
    ) -> str:
        """Why `backend` is not to be used for such a layer here; empty where it gives what the reference gives."""
        is_there = spec.sinks is not None, spec.alibi_slopes is not None
        shape = (spec.num_heads, spec.num_kv_heads, spec.key_dim, spec.value_dim)
        facts = (id(backend), *shape, spec.scaling, spec.window, spec.softcap, *is_there, dtype)
        if facts not in self._proved:
            self._proved[facts] = _compare(backend, spec, dtype, device)
        return self._proved[facts]


def _compare(backend: AttentionBackend, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str:
    """A prompt to the end of a page, then guesses, a single token and the begin of a prompt. Returns what is wrong."""
    far = backend.page_size - 2
    steps = [
        [Segment(0, far, [1, 4]), Segment(0, 1, [3])],
        [Segment(far, 4, [1, 4]), Segment(1, 1, [3]), Segment(0, 5, [2])],
    ]
    reference = ReferenceAttention(backend.page_size, backend.kv_dtype)
    name = type(backend).__name__
    try:
        ours, theirs = (each.allocate(spec, 5, dtype, device) for each in (backend, reference))
        for segments in steps:
            pairs = zip((backend, reference), (ours, theirs), strict=True)
            found, wanted = (_attend(each, kv, segments, spec, dtype, device) for each, kv in pairs)
            worst = float((found - wanted).abs().max())
            if not worst <= TOLERANCE:
                return f"{name} is off by {worst:.3g} for a few random rows"
    except Exception as error:  # whatever it is, there is another way
        said = str(error).partition("\n")[0]
        return f"{name} does not run: {type(error).__name__}: {said}"
    return ""


def _attend(
    backend: AttentionBackend,
    kv: LayerKV,
    segments: Sequence[Segment],
    spec: AttentionSpec,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """[T, heads, value_dim] float32 of rows that are the same for every backend."""
    generator = torch.Generator().manual_seed(0)
    inputs = StepInputs(backend.page_size, device)
    num_rows = sum(segment.num_tokens for segment in segments)
    ids = torch.zeros(num_rows, dtype=torch.long, device=device)
    inputs.fill(segments, ids, ids[:1])
    backend.prepare(inputs)
    sizes = ((spec.num_heads, spec.key_dim), (spec.num_kv_heads, spec.key_dim), (spec.num_kv_heads, spec.value_dim))
    query, key, value = (torch.randn(num_rows, *size, generator=generator).to(device, dtype) for size in sizes)
    return backend.attend(spec, kv, query, key, value).float()
