"""RMS norms, gates and rotary positions on CUDA: three Triton kernels, each of which reads and writes a row once.

Semantics are those of transformers' plain modules: computed in float32, rounded to the number format where they round.
Launch grids and addresses depend on shapes alone, so a captured graph may hold every launch. A row's bits do not depend
on other rows.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' text, annotations too)

from typing import Any

import torch
import triton
import triton.language as tl

from lorikeet.shard.system.operators import operator

GATE_BLOCK = 1024
"""Outputs of one program of `gate_rows`."""
HEADS = 8
"""Heads of one program of `rotate_heads`."""
WARP_WIDTH = 512
"""Elements of a row for each warp of a norm."""
MOST_WARPS = 16
FIXED: dict[str, Any] = {"enable_fp_fusion": False}
"""Every product is rounded separately, as by separate operators."""
TRUNCATES = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter truncates to bfloat16, where a device rounds."""


@triton.jit
def rounded(values, element: tl.constexpr):
    """float32 values in the number format `element`, to the nearest."""
    if TRUNCATES and element == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        values = ((bits >> 16) << 16).to(tl.float32, bitcast=True)
    return values.to(element)


@triton.jit
def _weighted(scaled, weight, OFFSET: tl.constexpr, ROUNDS: tl.constexpr, element: tl.constexpr):
    """A norm's last step: `weight * scaled`, with ROUNDS rounded before the weight too."""
    if ROUNDS:
        scaled = rounded(scaled, element).to(tl.float32)
    return rounded(scaled * (weight.to(tl.float32) + OFFSET), element)


@triton.jit
def norm_rows(
    x, added, weight, sums, y, count, x_stride, added_stride, epsilon,
    BLOCK: tl.constexpr, OFFSET: tl.constexpr, ROUNDS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """y[row] = norm(x[row]), or with ADDS sums[row] = x[row] + added[row] and y[row] = norm(sums[row])."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < count
    normed = _normed(
        x, added, weight, sums, row, columns, mask, count, x_stride, added_stride, epsilon, y.dtype.element_ty,
        OFFSET, ROUNDS, ADDS,
    )  # fmt: skip
    tl.store(y + row * count + columns, normed, mask=mask)


@triton.jit(do_not_specialize=["target", "num_targets"])
def adapted_norm_rows(
    x, added, weight, sums, y, slots, table, target, num_targets, count, x_stride, added_stride, epsilon,
    BLOCK: tl.constexpr, OFFSET: tl.constexpr, ROUNDS: tl.constexpr, ADDS: tl.constexpr, ENTRY: tl.constexpr,
):  # fmt: skip
    """As `norm_rows`, then the scale and the bias of the adapter in the row's slot, if it has any for the target.
    table: by slot and target ENTRY numbers each, rank and addresses of a, b, scale and bias, 0 for none.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < count
    element: tl.constexpr = y.dtype.element_ty
    slot = tl.load(slots + row)
    entry = table + (tl.maximum(slot, 0) * num_targets + target) * ENTRY
    scale_at = tl.where(slot >= 0, tl.load(entry + 3), 0)
    bias_at = tl.where(slot >= 0, tl.load(entry + 4), 0)
    normed = _normed(
        x, added, weight, sums, row, columns, mask, count, x_stride, added_stride, epsilon, element, OFFSET, ROUNDS,
        ADDS,
    )  # fmt: skip
    if (scale_at != 0) | (bias_at != 0):
        # the number of each: all or none
        num_scales, num_biases = tl.where(scale_at != 0, count, 0), tl.where(bias_at != 0, count, 0)
        scale = tl.load(scale_at.to(tl.pointer_type(tl.float32)) + columns, mask=columns < num_scales, other=1.0)
        bias = tl.load(bias_at.to(tl.pointer_type(tl.float32)) + columns, mask=columns < num_biases, other=0.0)
        normed = rounded(scale * normed.to(tl.float32) + bias, element)
    tl.store(y + row * count + columns, normed, mask=mask)


@triton.jit
def _normed(
    x, added, weight, sums, row, columns, mask, count, x_stride, added_stride, epsilon, element: tl.constexpr,
    OFFSET: tl.constexpr, ROUNDS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """[columns] of a row; with ADDS the sum is stored too."""
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(added + row * added_stride + columns, mask=mask, other=0.0).to(tl.float32)
        total = rounded(values, element)
        tl.store(sums + row * count + columns, total, mask=mask)
        values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / count + epsilon)
    weights = tl.load(weight + columns, mask=mask, other=0.0)
    return _weighted(values * scale, weights, OFFSET, ROUNDS, element)


@triton.jit
def gate_rows(x, y, num_hidden, x_stride, BLOCK: tl.constexpr, IS_TANH: tl.constexpr):
    """y[row] = act(x[row, :num_hidden]) * x[row, num_hidden:]; act is SiLU, or GELU by its tanh formula."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_hidden
    element: tl.constexpr = y.dtype.element_ty
    gate = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + num_hidden + columns, mask=mask, other=0.0).to(tl.float32)
    inner = gate
    if IS_TANH:  # (1 + tanh z) / 2 = 1 / (1 + exp(-2 z)), and twice the root of 2 / pi
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    small = tl.exp(-tl.abs(inner))
    share = tl.where(inner >= 0, 1.0, small) / (1.0 + small)
    activated = rounded(gate * share, element).to(tl.float32)
    tl.store(y + row * num_hidden + columns, rounded(activated * up, element), mask=mask)


@triton.jit
def _head_weight(q_weight, k_weight, is_query, offsets, mask):
    """[heads, offsets] weights of each head's norm."""
    of_query = tl.load(q_weight + offsets, mask=mask, other=0.0)
    of_key = tl.load(k_weight + offsets, mask=mask, other=0.0)
    return tl.where(is_query[:, None], of_query[None, :], of_key[None, :])


@triton.jit
def _write_heads(values, pool, slot, row_heads, first_head, mask, offsets, KV_HEADS, DIM: tl.constexpr):
    """Write [heads, offsets] of a row to the pages of K or of V, whose heads begin at `first_head` of the row."""
    place = (slot * KV_HEADS + row_heads - first_head)[:, None] * DIM + offsets[None, :]
    is_one = (row_heads >= first_head) & (row_heads < first_head + KV_HEADS)
    tl.store(pool + place, values.to(pool.dtype.element_ty), mask=is_one[:, None] & mask[None, :])


@triton.jit
def rotate_heads(
    x, cos, sin, q_weight, k_weight, slots, keys, values, num_heads, num_rotated, x_stride, epsilon,
    DIM: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, TAIL: tl.constexpr, HEADS: tl.constexpr,
    NORMS: tl.constexpr, OFFSET: tl.constexpr, ROUNDS: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    """Rotate the first WIDTH of the DIM elements of each of the first `num_rotated` heads of x[row], in place; with
    NORMS after the norm of q (the first `num_heads`) or of k. With STORES those of k, and of v behind them, are written
    to their pages instead. HALF, TAIL: powers of two that hold half of WIDTH, and what follows WIDTH.
    """
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    num_read, num_written, kv_heads = num_rotated, num_rotated, num_rotated - num_heads
    if STORES:
        num_read, num_written = num_rotated + kv_heads, num_heads
        slot = tl.load(slots + row)
    offsets = tl.arange(0, HALF)
    inside = offsets < WIDTH // 2
    mask, written = (heads < num_read)[:, None] & inside[None, :], (heads < num_written)[:, None] & inside[None, :]
    element: tl.constexpr = x.dtype.element_ty
    first_place = x + row * x_stride + heads[:, None] * DIM + offsets[None, :]
    second_place = first_place + WIDTH // 2
    first = tl.load(first_place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(second_place, mask=mask, other=0.0).to(tl.float32)
    tail = WIDTH + tl.arange(0, TAIL)
    if STORES:
        _write_heads(first, values, slot, heads, num_rotated, inside, offsets, kv_heads, DIM)
        _write_heads(second, values, slot, heads, num_rotated, inside, WIDTH // 2 + offsets, kv_heads, DIM)
    if WIDTH < DIM:
        tail_place = x + row * x_stride + heads[:, None] * DIM + tail[None, :]
        rest = tl.load(tail_place, mask=(heads < num_read)[:, None] & (tail < DIM)[None, :], other=0.0).to(tl.float32)
        if STORES:
            _write_heads(rest, values, slot, heads, num_rotated, tail < DIM, tail, kv_heads, DIM)
    if NORMS:
        is_query = heads < num_heads
        total = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if WIDTH < DIM:
            total += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(total / DIM + epsilon)[:, None]
        weight = _head_weight(q_weight, k_weight, is_query, offsets, inside)
        first = _weighted(first * scale, weight, OFFSET, ROUNDS, element).to(tl.float32)
        weight = _head_weight(q_weight, k_weight, is_query, WIDTH // 2 + offsets, inside)
        second = _weighted(second * scale, weight, OFFSET, ROUNDS, element).to(tl.float32)
        if WIDTH < DIM:
            weight = _head_weight(q_weight, k_weight, is_query, tail, tail < DIM)
            rest = _weighted(rest * scale, weight, OFFSET, ROUNDS, element).to(tl.float32)
            tail_written = (heads < num_written)[:, None] & (tail < DIM)[None, :]
            tl.store(tail_place, rest.to(element), mask=tail_written)
    if STORES and WIDTH < DIM:
        _write_heads(rest, keys, slot, heads, num_heads, tail < DIM, tail, kv_heads, DIM)

    angle = row * WIDTH + offsets
    first_cos = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cos + angle + WIDTH // 2, mask=inside, other=0.0).to(tl.float32)[None, :]
    second_sin = tl.load(sin + angle + WIDTH // 2, mask=inside, other=0.0).to(tl.float32)[None, :]
    # each product is rounded, as by separate operators
    kept, crossed = rounded(first * first_cos, element), rounded(second * first_sin, element)
    turned = rounded(kept.to(tl.float32) - crossed.to(tl.float32), element)
    tl.store(first_place, turned, mask=written)
    if STORES:
        _write_heads(turned, keys, slot, heads, num_heads, inside, offsets, kv_heads, DIM)
    kept, crossed = rounded(second * second_cos, element), rounded(first * second_sin, element)
    turned = rounded(kept.to(tl.float32) + crossed.to(tl.float32), element)
    tl.store(second_place, turned, mask=written)
    if STORES:
        _write_heads(turned, keys, slot, heads, num_heads, inside, WIDTH // 2 + offsets, kv_heads, DIM)


@operator("rms_norm", mutates_args=())
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float, rounds: bool,
    slots: torch.Tensor | None = None, table: torch.Tensor | None = None, target: int = 0,
) -> torch.Tensor:  # fmt: skip
    """`(weight + offset) * x / sqrt(mean(x²) + epsilon)` over the last axis; `rounds` before the weight is applied.

    x: [..., H]; weight: [H]. Returns [..., H], contiguous; with slots, [rows or more] int32, and the table of
    DeviceKernels, as the adapters of the rows change the target's output.
    """
    rows = _rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(rows, rows, weight, y, y, (epsilon, offset, rounds), (slots, table, target), adds=False)
    return y


@rms_norm.register_fake
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operator("add_rms_norm", mutates_args=())
def add_rms_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float, rounds: bool,
    slots: torch.Tensor | None = None, table: torch.Tensor | None = None, target: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """x, added: [..., H]. Returns `x + added`, rounded, and its `rms_norm`."""
    sums, y = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch_norm(_rows(x), _rows(added), weight, sums, y, (epsilon, offset, rounds), (slots, table, target), adds=True)
    return sums, y


@add_rms_norm.register_fake
def _(x: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operator("gate", mutates_args=())
def gate(x: torch.Tensor, is_tanh: bool) -> torch.Tensor:
    """x: [rows, 2 n], gates first. Returns [rows, n]: `silu(gate) * up`, with `is_tanh` GELU's tanh formula instead."""
    num_rows, num_hidden = x.shape[0], x.shape[1] // 2
    y = torch.empty(num_rows, num_hidden, dtype=x.dtype, device=x.device)
    block = min(GATE_BLOCK, triton.next_power_of_2(num_hidden))
    grid = (num_rows, triton.cdiv(num_hidden, block))
    with torch.cuda.device_of(x):  # Triton launches on the thread's current device
        gate_rows[grid](x, y, num_hidden, x.stride(0), BLOCK=block, IS_TANH=is_tanh, num_warps=4, **FIXED)
    return y


@gate.register_fake
def _(x: torch.Tensor, is_tanh: bool) -> torch.Tensor:
    return torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)


@operator("rotate", mutates_args=("x", "keys", "values"))
def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, shape: list[int],
    q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, slots: torch.Tensor | None,
    keys: torch.Tensor | None, values: torch.Tensor | None, epsilon: float, offset: float, rounds: bool,
) -> None:  # fmt: skip
    """Rotate q and k by their rows' angles, in place, after their norms, if any (Su et al. 2021).

    x: [T, columns], the heads of q, then those of k, then others; cos, sin: [T, R] contiguous, R even: the first R
    elements of each head are rotated. shape: heads of q, heads of k, elements of a head. q_weight, k_weight: [D] of the
    norms, as in `rms_norm`. With slots, [T] int64, k goes to keys and v to values, [slots, heads of k, D], and not back
    to x.
    """
    num_heads, num_kv_heads, head_dim = shape
    width = cos.shape[1]
    num_rotated, stores = num_heads + num_kv_heads, slots is not None
    grid = (x.shape[0], triton.cdiv(num_rotated + num_kv_heads * stores, HEADS))
    with torch.cuda.device_of(x):
        rotate_heads[grid](
            x, cos, sin, cos if q_weight is None else q_weight, cos if k_weight is None else k_weight,
            slots if stores else cos, keys if stores else cos, values if stores else cos,
            num_heads, num_rotated, x.stride(0), epsilon, DIM=head_dim, WIDTH=width,
            HALF=triton.next_power_of_2(width // 2), TAIL=triton.next_power_of_2(max(1, head_dim - width)), HEADS=HEADS,
            NORMS=q_weight is not None, OFFSET=offset, ROUNDS=rounds, STORES=stores, num_warps=2, **FIXED,
        )  # fmt: skip


@rotate.register_fake
def _(*_args: object) -> None:
    return None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, H], contiguous along the last axis."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, sums: torch.Tensor, y: torch.Tensor,
    form: tuple[float, float, bool], adapters: tuple[torch.Tensor | None, torch.Tensor | None, int], adds: bool,
) -> None:  # fmt: skip
    """x, added, sums, y: [rows, H]; form: epsilon, offset and whether it rounds; adapters: slots, table and target."""
    count, (epsilon, offset, rounds), (slots, table, target) = x.shape[1], form, adapters
    sizes = count, x.stride(0), added.stride(0), epsilon
    block, warps = triton.next_power_of_2(count), num_warps(count)
    with torch.cuda.device_of(x):
        if slots is None or table is None:
            norm_rows[(x.shape[0],)](
                x, added, weight, sums, y, *sizes, BLOCK=block, OFFSET=offset, ROUNDS=rounds, ADDS=adds,
                num_warps=warps, **FIXED,
            )  # fmt: skip
        else:
            adapted_norm_rows[(x.shape[0],)](
                x, added, weight, sums, y, slots, table, target, table.shape[1], *sizes, BLOCK=block, OFFSET=offset,
                ROUNDS=rounds, ADDS=adds, ENTRY=table.shape[2], num_warps=warps, **FIXED,
            )  # fmt: skip


def num_warps(count: int) -> int:
    """Number of warps for a norm over `count` elements, a power of two."""
    return min(MOST_WARPS, max(1, triton.next_power_of_2(count) // WARP_WIDTH))
