"""Every kernel at shapes of the large model: right, equal bits three times, and its share of the bandwidth."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from torch.nn import functional

from benchmarks.cuda import attention as of_attention
from benchmarks.cuda.check.rows import Row, Rows, ceilings
from benchmarks.cuda.setup import Setup, Step, limit_steps
from benchmarks.cuda.timing import seconds_of
from benchmarks.kernels import lora
from lorikeet.shard.attention import AttentionSpec, paged_triton
from lorikeet.shard.attention.base import PagedKV
from lorikeet.shard.attention.flash import kind_in_use
from lorikeet.shard.attention.kernel_limits import LEAST_QUERY, Limit, key_of, write_limits
from lorikeet.shard.attention.paged import PagedAttention
from lorikeet.shard.attention.reference import FP8, dequantize
from lorikeet.shard.attention.varlen import OLDEST
from lorikeet.shard.batch.inputs import HeadsRow, StepInputs
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.grammar import masks
from lorikeet.shard.grammar import triton as masks_triton
from lorikeet.shard.model.kernels import triton as fused
from lorikeet.shard.model.kernels.device_integers import DeviceIntegers
from lorikeet.shard.model.kernels.integers_triton import MOST_ROWS
from lorikeet.shard.model.kernels.pairs import sort_pairs
from lorikeet.shard.model.kernels.products_triton import multiply_tiles
from lorikeet.shard.model.medusa.cuda import DeviceHeads
from lorikeet.shard.model.medusa.heads import HeadsShape, SlotHeads
from lorikeet.shard.model.quantization.integers import round_weight
from lorikeet.shard.speculation.device import lookup_triton
from lorikeet.shard.speculation.device.device_drafts import (
    MOST_DRAFTS,
    NO_TOKEN,
    Emitted,
    Propose,
    Texts,
    propose,
)
from lorikeet.shard.system import gpu

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
PAGE = 64
ASSUMED_GBS = 3000.0
"""Bandwidth by which shares are computed where the stage `ceilings` has not run."""
FEW_BYTES = 1 << 28
"""K and V are drawn in parts of so many bytes."""


def check(rows: Rows, setup: Setup, is_brief: bool) -> None:
    Kernels(rows, setup).check()


class Kernels:
    """The kernels of one card."""

    def __init__(self, rows: Rows, setup: Setup) -> None:
        self._rows, self._setup = rows, setup
        self._device, self._dtype = torch.device(setup.device), getattr(torch, setup.dtype)
        self._copy_gbs = float(ceilings(rows.out).get("copy_gbs", ASSUMED_GBS))
        self._spec = of_attention.spec_of(setup.large)

    def check(self) -> None:
        with torch.inference_mode():
            self._attention()
            self._norms()
            self._rotation()
            self._adapters()
            self._integers()
            self._experts()
            self._masks()
            self._heads()
            self._lookup()

    def _attention(self) -> None:
        spec, is_cuda = self._spec, self._setup.is_cuda
        steps = [Step(1, 1, 1024), Step(64, 1, 1024), Step(8, 5, 8192), Step(1, 1, 32768), Step(1, 2048, 2048)]
        for step in steps if is_cuda else [Step(2, 1, 70), Step(1, 5, 70)]:
            self._rows.check(f"attend {step.name}", partial(self._attend, step, spec))
        eight_bits = Step(64, 1, 1024) if is_cuda else Step(2, 1, 70)
        self._rows.check(f"attend {eight_bits.name}, fp8", lambda: self._attend(eight_bits, spec, kv_dtype=FP8))
        narrow, window = (Step(64, 1, 8192), 1024) if is_cuda else (Step(2, 1, 130), 24)
        for what, other in (("soft cap", replace(spec, softcap=30.0)), ("window", replace(spec, window=window))):
            self._rows.check(f"attend {narrow.name}, {what}", partial(self._attend, narrow, other))
        if not is_cuda:
            return
        self._rows.check("attend beyond 2^31 elements", lambda: self._attend(Step(4, 1, 1024), spec, page0=33_000))
        for step in (Step(64, 1, 1024), Step(1, 1, 32768), Step(1, 2048, 2048)):
            self._rows.check(f"attend {step.name}, 5 stages", partial(self._attend, step, spec, stages=5))
        for span in (128, 256):
            self._rows.check(f"attend 1 in 1024, spans of {span}", partial(self._attend, steps[0], spec, span=span))

    def _attend(
        self, step: Step, spec: AttentionSpec, page0: int = 0, span: int = 512, stages: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> Row:  # fmt: skip
        """One layer over pages from `page0` on. `span`, `stages`: another cut of the work than the usual one."""
        if stages:
            tile = paged_triton.AttentionTile(64, 64, 4, stages)
            with patch.object(paged_triton, "tile_of", lambda *_: tile):
                return self._attend(step, spec, page0, span, kv_dtype=kv_dtype)
        backend = PagedAttention(PAGE, kv_dtype, span=span)
        pages = -(-step.context // PAGE)
        kv = backend.allocate(spec, page0 + step.requests * pages, self._dtype, self._device)
        assert isinstance(kv, PagedKV)
        for pool, scales in ((kv.keys, kv.key_scales), (kv.values, kv.value_scales)):
            for part in pool[page0:].split(max(1, FEW_BYTES // pool[0].nbytes)):
                part.copy_(torch.randn(part.shape, device=self._device))
            if scales is not None:
                scales[page0:] = 1.0
        inputs = StepInputs(PAGE, self._device)
        start = step.context - step.tokens
        tables = [range(page0 + at * pages, page0 + (at + 1) * pages) for at in range(step.requests)]
        num_rows = step.requests * step.tokens
        ids = torch.zeros(num_rows, dtype=torch.long, device=self._device)
        inputs.fill([Segment(start, step.tokens, list(table)) for table in tables], ids, ids[:1], [0])
        backend.prepare(inputs)
        inputs.send()
        heads = ((spec.num_heads, spec.key_dim), (spec.num_kv_heads, spec.key_dim), (spec.num_kv_heads, spec.value_dim))
        query, key, value = (torch.randn(num_rows, *size, device=self._device, dtype=self._dtype) for size in heads)
        output, off = backend.attend(spec, kv, query, key, value), 0.0
        for at in {0, step.requests - 1}:  # against float32
            part = slice(at * step.tokens, (at + 1) * step.tokens)
            both = []
            for pool, scales in ((kv.keys, kv.key_scales), (kv.values, kv.value_scales)):
                held = pool[tables[at].start : tables[at].stop].float()
                if scales is not None:
                    held = dequantize(held, scales[tables[at].start : tables[at].stop])
                both.append(held.flatten(0, 1)[: step.context].transpose(0, 1))
            mask = torch.ones(step.tokens, step.context, dtype=torch.bool, device=self._device).tril(start)
            if spec.window is not None:
                mask = mask.triu(start + 1 - spec.window)
            keys, values = both
            expected = _attended(spec, query[part].float().transpose(0, 1), keys, values, mask).transpose(0, 1)
            off = max(off, _off(output[part], expected))
        num_bytes = (
            step.requests
            * min(step.context, spec.window or step.context)
            * spec.num_kv_heads
            * 2
            * spec.key_dim
            * kv.keys.element_size()
        )
        timed = self._timed(lambda: backend.read(spec, kv, query), num_bytes)
        return {**timed, "off": off, "ok": timed["ok"] and off < TOLERANCE[self._dtype]}

    def _norms(self) -> None:
        """Weights span four orders of magnitude, as those of real models do."""
        setup, dtype = self._setup, self._dtype
        hidden, mlp, count = setup.large.hidden, setup.large.mlp, setup.requests
        x, added = (torch.randn(count, hidden, device=self._device, dtype=dtype) for _ in range(2))
        weight = torch.logspace(-2, 2, hidden, device=self._device).to(dtype)

        def normed(values: torch.Tensor) -> torch.Tensor:
            scale = torch.rsqrt(values.float().pow(2).mean(-1, keepdim=True) + 1e-5)
            return (values.float() * scale).to(dtype) * weight

        def check_norm() -> Row:
            return self._judged(lambda: fused.rms_norm(x, weight, 1e-5, 0.0, True), normed(x), 2 * x.nbytes)

        def check_sum() -> Row:
            return self._judged(
                lambda: fused.add_rms_norm(x, added, weight, 1e-5, 0.0, True)[1], normed(x + added), 4 * x.nbytes
            )

        self._rows.check("rms_norm", check_norm)
        self._rows.check("add_rms_norm", check_sum)
        both = torch.randn(count, 2 * mlp, device=self._device, dtype=dtype)
        gated = torch.nn.functional.silu(both[:, :mlp].float()).to(dtype) * both[:, mlp:]
        num_bytes = both.nbytes + gated.nbytes
        self._rows.check("gate", lambda: self._judged(lambda: fused.gate(both, False), gated, num_bytes))

    def _rotation(self) -> None:
        """Query and key are rotated, key and value stored into pages, by one launch."""
        spec, count, dtype = self._spec, self._setup.requests, self._dtype
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.key_dim

        def check() -> Row:
            angles = torch.randn(count, dim // 2, device=self._device).repeat(1, 2)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            qkv = torch.randn(count, (heads + 2 * kv_heads) * dim, device=self._device, dtype=dtype)
            slots = torch.randperm(count * PAGE, device=self._device)[:count]
            keys, values = torch.zeros(2, count, PAGE, kv_heads, dim, device=self._device, dtype=dtype).unbind()

            def rotate() -> torch.Tensor:
                rotated = qkv.clone()
                fused.rotate(
                    rotated, cos, sin, [heads, kv_heads, dim], None, None, slots, keys, values, 0.0, 0.0, False
                )
                return torch.cat([
                    rotated.view(count, -1, dim)[:, :heads].flatten(),
                    keys.flatten(0, 1)[slots].flatten(),
                    values.flatten(0, 1)[slots].flatten(),
                ])  # fmt: skip

            parts = qkv.view(count, -1, dim).float()
            first, second = parts.split(dim // 2, dim=2)
            turned = parts * cos[:, None].float() + torch.cat([-second, first], 2) * sin[:, None].float()
            expected = torch.cat([turned[:, :heads].flatten(), turned[:, heads : heads + kv_heads].flatten(),
                                  parts[:, heads + kv_heads :].flatten()])  # fmt: skip
            return self._judged(rotate, expected, 4 * qkv.nbytes)

        self._rows.check("rotate and store", check)

    def _adapters(self) -> None:
        setup = self._setup
        hidden, mlp = setup.large.hidden, setup.large.mlp
        for num_in, num_out in [(hidden, hidden), (hidden, mlp), (mlp, hidden)] if setup.is_cuda else [(24, 20)]:
            for mix in ("distinct", "identical"):

                def check(num_in: int = num_in, num_out: int = num_out, mix: str = mix) -> Row:
                    return self._adapt(num_in, num_out, mix)

                self._rows.check(f"adapt {num_in}->{num_out} {mix}", check)

    def _adapt(self, num_in: int, num_out: int, mix: str) -> Row:
        setup, size = self._setup, self._dtype.itemsize
        requests = setup.requests if setup.is_cuda else 3
        case = lora.Case(lora.Size(num_in, num_out, setup.rank, requests, 1), mix, self._device, self._dtype)
        expected = case.y.clone()
        case.by_row(expected)

        def adapted() -> torch.Tensor:
            y = case.y.clone()
            case.kernels(y)
            return y

        same, off = _repeats(adapted), _off(adapted(), expected)
        y, num_bytes = case.y.clone(), len(set(case.slots)) * setup.rank * (num_in + num_out) * size
        timed = self._rates(lambda: case.kernels(y), num_bytes)
        grouped = seconds_of(lambda: case.grouped(expected), self._device, setup.repeats)
        ok = same and off < TOLERANCE[self._dtype]
        return {"ok": ok, "off": off, **timed, "bmm_over_ours": 1e6 * grouped / timed["us"]}

    def _integers(self) -> None:
        """Weights of 8 and 4 bits against the dequantised weight, with few rows, with a batch and with a prompt."""
        setup = self._setup
        num_in, num_out = (setup.large.hidden, setup.large.mlp) if setup.is_cuda else (64, 32)
        for bits in (8, 4):
            for count in (1, setup.requests, MOST_ROWS + 1):

                def check(bits: int = bits, count: int = count) -> Row:
                    weight = torch.randn(num_out, num_in, device=self._device) * num_in**-0.5
                    held = DeviceIntegers(round_weight(weight, bits), None, self._dtype)
                    x = torch.randn(count, num_in, device=self._device, dtype=self._dtype)
                    expected = x.float() @ held.dense(torch.float32).t()
                    return self._judged(lambda: held.product(x, False), expected, num_in * num_out * bits // 8)

                self._rows.check(f"product {num_in}->{num_out}, {bits} bits, {count} rows", check)

    def _experts(self) -> None:
        """Two of eight experts for each row."""
        setup = self._setup
        num_in, num_out = (setup.large.hidden, setup.large.mlp) if setup.is_cuda else (24, 20)
        for count in (1, setup.requests):

            def check(count: int = count) -> Row:
                ids = torch.rand(count, 8, device=self._device).argsort(1)[:, :2]
                pairs = sort_pairs(ids, 8)
                x = torch.randn(2 * count, num_in, device=self._device, dtype=self._dtype)
                matrices = torch.randn(8, num_in, num_out, device=self._device, dtype=self._dtype) * num_in**-0.5
                expected = torch.cat([x[span].float() @ matrices[expert].float() for expert, span in pairs.spans()])
                num_bytes = len(set(ids.flatten().tolist())) * matrices[0].nbytes
                return self._judged(lambda: multiply_tiles(x, matrices, pairs), expected, num_bytes)

            self._rows.check(f"experts {num_in}->{num_out}, {count} rows", check)

    def _masks(self) -> None:
        """The allowed tokens of every row."""
        count, vocabulary = self._setup.requests, self._setup.large.vocabulary

        def check() -> Row:
            logits = torch.randn(count, vocabulary, device=self._device, dtype=self._dtype)
            words = torch.randint(-(2**31), 2**31, (count, -(-vocabulary // 32)), device=self._device)
            packed = torch.cat([torch.arange(count, device=self._device)[:, None], words], 1).int()
            expected = logits.clone()
            masks.mask_rows(expected, packed)

            def mask() -> torch.Tensor:
                masked = logits.clone()
                masks_triton.mask_rows(masked, packed)
                return masked.nan_to_num(neginf=-1.0)

            return self._judged(mask, expected.nan_to_num(neginf=-1.0), 2 * logits.nbytes)

        self._rows.check("masks of grammars", check)

    def _heads(self) -> None:
        """Three Medusa heads of one block for each request, of one adapter and of several."""
        setup, dtype, num_heads = self._setup, self._dtype, 3
        hidden, count = setup.large.hidden, setup.requests
        inputs = StepInputs(PAGE, self._device)
        slots = min(4, count)
        inputs.reserve_groups(max_rows=count, max_slots=slots, max_drafts=count * num_heads)
        heads, shape = DeviceHeads(inputs, slots), HeadsShape(num_heads, 1, hidden, 0)
        sizes = list(shape.tensors())
        drawn = [[torch.randn(size, device=self._device, dtype=dtype) * hidden**-0.5 for size in sizes]
                 for _ in range(slots)]  # fmt: skip
        for slot, tensors in enumerate(drawn):
            heads.bind(slot, SlotHeads(num_heads, hidden, [[]], [], tensors))
        ids, x = torch.arange(count, device=self._device), torch.randn(count, hidden, device=self._device, dtype=dtype)
        for used in (1, slots):

            def check(used: int = used) -> Row:
                own = [row % used for row in range(count)]
                inputs.fill(
                    [Segment(0, 1, range(1)) for _ in own], ids, ids, list(range(count)),
                    [HeadsRow(row, slot, num_heads) for row, slot in enumerate(own)],
                )  # fmt: skip
                inputs.send()
                expected = []
                for row, slot in enumerate(own):
                    weights, biases = (tensor.float() for tensor in drawn[slot])
                    expected += list(x[row].float() + functional.silu(weights @ x[row].float() + biases))
                num_bytes = used * sum(tensor.nbytes for tensor in drawn[0])
                return self._judged(lambda: heads.draft(x)[count:], torch.stack(expected), num_bytes)

            self._rows.check(f"heads, {count} rows of {used} adapters", check)

    def _lookup(self) -> None:
        """Drafts of prompt lookup for texts of 8 192 tokens, equal to those of the host."""
        count, length = (self._setup.requests, 8192) if self._setup.is_cuda else (2, 60)
        generator = torch.Generator().manual_seed(self._setup.seed)
        known = torch.randint(0, 50, (count, length + 8), generator=generator, dtype=torch.int32)
        table = torch.tensor([[row, row, 0, 0, 0, 0] for row in range(count)]).t().contiguous()
        newest = torch.randint(0, 50, (count,), generator=generator)

        def drafted(function: Propose, device: torch.device) -> torch.Tensor:
            texts = Texts(
                known.to(device), torch.full((count,), length, device=device),
                torch.full((2, count, MOST_DRAFTS), NO_TOKEN, device=device), newest.to(device),
                torch.zeros(count, dtype=torch.long, device=device),
            )  # fmt: skip
            zeros = torch.zeros(count, dtype=torch.long, device=device)
            report = torch.empty(count, MOST_DRAFTS + 1, dtype=torch.long, device=device)
            emitted = Emitted(table.to(device), newest.to(device), zeros.to(torch.uint8), zeros, report)
            function(texts, emitted, range(1, 9))
            return texts.draft_ids

        def check() -> Row:
            expected = drafted(propose, torch.device("cpu"))
            found = drafted(lookup_triton.propose, self._device).cpu()
            timed = self._rates(lambda: drafted(lookup_triton.propose, self._device), 8 * known.nbytes)
            return {**timed, "ok": torch.equal(found, expected) and bool((found != NO_TOKEN).any())}

        self._rows.check(f"lookup in {length} tokens, {count} rows", check)

    def _judged(self, call: Callable[[], torch.Tensor], expected: torch.Tensor, num_bytes: float) -> Row:
        timed, off = self._timed(call, num_bytes), _off(call(), expected)
        return {**timed, "off": off, "ok": timed["ok"] and off < TOLERANCE[self._dtype]}

    def _timed(self, call: Callable[[], torch.Tensor], num_bytes: float) -> Row:
        same = _repeats(call)
        return {"ok": same, **self._rates(call, num_bytes), "same_bits": same}

    def _rates(self, call: Callable[[], object], num_bytes: float) -> Row:
        seconds = seconds_of(call, self._device, self._setup.repeats)
        rate = num_bytes / seconds / 1e9
        return {"us": 1e6 * seconds, "gbs": rate, "share_of_copy": rate / self._copy_gbs}


def check_limits(rows: Rows, setup: Setup, is_brief: bool) -> None:
    """A row per query and context length. On CUDA, the limits of the card replace those in the table that shards read,
    at the end.
    """
    found: dict[tuple[int, int], Mapping[str, float]] = {}

    def timed(step: Step) -> Row:
        times = found[step.tokens, step.context] = of_attention.seconds_by_backend(setup, step)
        return {f"{name}_us": 1e6 * seconds for name, seconds in times.items()}

    def write() -> Row:
        limits, capability = limits_of(found), gpu.capability(torch.device(setup.device))
        key = key_of(capability, kind_in_use())
        if setup.is_cuda and capability >= OLDEST:  # older devices run the paged kernel alone
            write_limits(key, limits)
        return {"card": key, "limits": json.dumps([limit._asdict() for limit in limits])}

    are_right = [rows.check(step.name, partial(timed, step), is_needed=True) for step in limit_steps(setup)]
    if all(are_right):
        rows.check("limits of the card", write)


def limits_of(seconds: Mapping[tuple[int, int], Mapping[str, float]]) -> Sequence[Limit]:
    """seconds: of each backend, by query length and context length. A limit is the longest measured query up to which
    the paged kernel takes no longer than FlashAttention; that of the longest context is for all longer ones.
    """
    limits: list[Limit] = []
    for context in sorted({context for _, context in seconds}):
        most = LEAST_QUERY
        for query in sorted(query for query, end in seconds if end == context):
            times = seconds[query, context]
            if times["triton"] > times["varlen"]:
                break
            most = max(most, query)
        limits.append(Limit(context, most))
    return [*limits[:-1], limits[-1]._replace(max_context=None)]


def _attended(
    spec: AttentionSpec, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """query: [heads, tokens, dim], keys, values: [kv_heads, context, dim] float32; mask: [tokens, context] what is
    seen. Returns [heads, tokens, dim].
    """
    if spec.softcap is None:
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=spec.scaling, enable_gqa=True
        )
    keys, values = (each.repeat_interleave(spec.group, 0) for each in (keys, values))
    scores = spec.softcap * torch.tanh(query @ keys.transpose(1, 2) * spec.scaling / spec.softcap)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values


def _repeats(call: Callable[[], torch.Tensor]) -> bool:
    """Whether three calls give equal bits."""
    first = call().clone()
    return all(torch.equal(call(), first) for _ in range(2))


def _off(values: torch.Tensor, expected: torch.Tensor) -> float:
    """How far off, of the whole; NaN where a value is not finite."""
    return float((values.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-9))
