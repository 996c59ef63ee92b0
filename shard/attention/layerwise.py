"""Runs each layer on the first of several backends that supports it and that was verified to compute it correctly here.

Before a backend is used for a kind of layer, it computes a few random rows, whose elements must all agree with the
reference. Their scores are as large as a soft cap needs to matter, and the channels of K and V are of different sizes.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lorikeet.shard.attention.base import AttentionBackend, AttentionSpec, KvDestination, LayerKV
from lorikeet.shard.attention.reference import ReferenceAttention
from lorikeet.shard.attention.spans import SPAN
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.padding import Bounds
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.system import comparison

logger = logging.getLogger(__name__)

OCTAVES = 3.0
"""Channels of K and V are up to this many powers of two larger or smaller than one."""
SCORES = (0.5, 8.0)
"""Standard deviation of the scores of the first and of the last head: the others' are between them."""


class PlacedKV(LayerKV):
    """K and V of one layer, and the backend that owns them."""

    def __init__(self, owner: AttentionBackend, kv: LayerKV) -> None:
        self.owner, self.kv = owner, kv


class LayerwiseAttention(AttentionBackend):
    """Backends of one page size, the fastest first; the last one supports every layer."""

    def __init__(self, backends: Sequence[AttentionBackend]) -> None:
        self.page_size = backends[-1].page_size
        self.kv_dtype = backends[-1].kv_dtype
        self._backends = backends
        self._used: list[AttentionBackend] = []
        self._verified: dict[tuple[object, ...], str] = {}
        self._logged: set[str] = set()

    @property
    def can_capture(self) -> bool:  # type: ignore[override]
        """Whether all backends in use can."""
        return all(backend.can_capture for backend in self._used or self._backends[:1])

    @property
    def can_add_accepted(self) -> bool:  # type: ignore[override]
        """Whether all backends in use can."""
        return all(backend.can_add_accepted for backend in self._used or self._backends[:1])

    def allocate(self, spec: AttentionSpec, num_pages: int, dtype: torch.dtype, device: torch.device) -> PlacedKV:
        *others, owner = self._backends
        reasons: list[str] = []
        for backend in others:
            unsupported = backend.unsupported_reason(spec, dtype, device)
            reason = unsupported or self.verify_backend(backend, spec, dtype, device)
            if not reason:
                owner = backend
                break
            reasons.append(reason)
        if owner not in self._used:
            self._used.append(owner)
        self._log(owner, "; ".join(reasons))
        return PlacedKV(owner, owner.allocate(spec, num_pages, dtype, device))

    def _log(self, owner: AttentionBackend, reasons: str) -> None:
        if not reasons or reasons in self._logged:
            return
        self._logged.add(reasons)
        if isinstance(owner, ReferenceAttention):
            logger.warning("attention runs on the slow reference backend: %s", reasons)
        else:
            logger.info("attention runs on %s: %s", type(owner).__name__, reasons)

    def num_numbers(self, bounds: Bounds) -> int:
        return sum(backend.num_numbers(bounds) for backend in self._used)

    def prepare(self, inputs: StepInputs) -> None:
        for backend in self._used:
            backend.prepare(inputs)

    def attend(
        self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(kv, PlacedKV)
        return kv.owner.attend(spec, kv.kv, query, key, value)

    def destination(self, kv: LayerKV) -> KvDestination | None:
        assert isinstance(kv, PlacedKV)
        return kv.owner.destination(kv.kv)

    def read(self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor) -> torch.Tensor:
        assert isinstance(kv, PlacedKV)
        return kv.owner.read(spec, kv.kv, query)

    def verify_backend(
        self, backend: AttentionBackend, spec: AttentionSpec, dtype: torch.dtype, device: torch.device
    ) -> str:
        """Why `backend` must not compute such a layer here; empty if it agrees with the reference."""
        has = spec.sinks is not None, spec.alibi_slopes is not None
        shape = (spec.num_heads, spec.num_kv_heads, spec.key_dim, spec.value_dim)
        kind = (id(backend), *shape, spec.scaling, spec.window, spec.softcap, spec.is_causal, *has, dtype)
        if kind not in self._verified:
            reasons = (_compare(part, spec, dtype, device) for part in backend.parts)
            self._verified[kind] = next(filter(None, reasons), "")
        return self._verified[kind]


def trial_steps(page_size: int) -> list[list[Segment]]:
    """A prompt to the end of a page; draft tokens, a single token and the start of a prompt; then a prompt and a token
    with keys of more than one span. Every kernel that attention may launch is launched, so that it is compiled.
    """
    far, long = page_size - 2, SPAN + 5
    pages = range(5, 6 + -(-long // page_size))
    return [
        [Segment(0, far, [1, 4]), Segment(0, 1, [3])],
        [Segment(far, 4, [1, 4]), Segment(1, 1, [3]), Segment(0, 5, [2])],
        [Segment(0, long, pages)],
        [Segment(long, 1, pages), Segment(2, 1, [3])],
    ]


def _compare(backend: AttentionBackend, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str:
    """Compute the trial steps. Returns the difference from the reference in words; empty if there is none."""
    reference = ReferenceAttention(backend.page_size, backend.kv_dtype)
    name = type(backend).__name__
    # with K and V in eight bits, kernels round to bfloat16 whatever the model's format is
    largest = comparison.LARGEST[dtype if backend.kv_dtype is None else torch.bfloat16]
    try:
        steps = trial_steps(backend.page_size)
        num_pages = 1 + max(page for segments in steps for segment in segments for page in segment.page_ids)
        ours, expected, terms = (
            _Trial(candidate, spec, candidate.allocate(spec, num_pages, dtype, device), device)
            for candidate in (backend, reference, reference)
        )
        for segments in steps:
            query, key, value = _trial_rows(spec, sum(segment.num_tokens for segment in segments))
            rows = [part.to(device, dtype) for part in (query, key, value)]
            # roundings change an output in proportion to its terms: probabilities times values, without signs
            sizes = terms.attend(segments, [*rows[:2], rows[2].abs()]).clamp(min=torch.finfo(dtype).tiny)
            shares = (ours.attend(segments, rows) - expected.attend(segments, rows)).abs() / sizes
            if not bool((shares <= largest).all()):
                return f"{name} is off by {float(shares.max()):.3g} of an output's terms for a few random rows"
    except Exception as error:  # whatever it is, another backend can run
        reason = str(error).partition("\n")[0]
        return f"{name} does not run: {type(error).__name__}: {reason}"
    return ""


@dataclass(frozen=True)
class _Trial:
    """A backend and its KV of one layer."""

    backend: AttentionBackend
    spec: AttentionSpec
    kv: LayerKV
    device: torch.device

    def attend(self, segments: Sequence[Segment], rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """rows: query, key and value of a step. Returns [T, heads, value_dim] float32."""
        inputs = StepInputs(self.backend.page_size, self.device)
        ids = torch.zeros(len(rows[0]), dtype=torch.long, device=self.device)
        inputs.fill(segments, ids, ids[:1])
        self.backend.prepare(inputs)
        query, key, value = rows
        return self.backend.attend(self.spec, self.kv, query, key, value).float()


def _trial_rows(spec: AttentionSpec, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of a step, [T, heads, dim] float32, the same each time: see OCTAVES and SCORES."""
    generator = torch.Generator().manual_seed(0)

    def drawn(num_heads: int, dim: int) -> torch.Tensor:
        return torch.randn(num_rows, num_heads, dim, generator=generator)

    def sizes(dim: int) -> torch.Tensor:
        return torch.logspace(-OCTAVES, OCTAVES, dim, base=2)[torch.randperm(dim, generator=generator)]

    of_keys, of_values = sizes(spec.key_dim), sizes(spec.value_dim)
    scores = torch.linspace(*SCORES, spec.num_heads)[:, None] / (spec.scaling * spec.key_dim**0.5)
    query = drawn(spec.num_heads, spec.key_dim) * scores / of_keys
    key = drawn(spec.num_kv_heads, spec.key_dim) * of_keys
    return query, key, drawn(spec.num_kv_heads, spec.value_dim) * of_values
