"""The one multiplication that Triton kernels for adapters and heads share: how a tile meets the matrix unit.

A sum takes its terms in the order of the tiles that it is given, in float32, inputs as they are.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' text, annotations too)

import triton
import triton.language as tl


@triton.jit
def multiply_add(left, right, sums, WIDENS: tl.constexpr):
    """left: [m, k], right: [k, n], sums: [m, n] float32. Returns sums + left right."""
    if WIDENS:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision="ieee")


WIDENS = not isinstance(multiply_add, triton.JITFunction)
"""Triton's interpreter cannot multiply bfloat16."""
