"""Compiles the kernels for a GPU that need not be here and looks at the instructions. Run by test_triton.py."""

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lorikeet.shard.model.kernels.tuning import BUILT_IN
from lorikeet.shard.model.lora import triton as kernels

NUMBERS = ("num_targets", "num_tasks", "num_parts")
TYPES = {
    "x": "*bf16", "h": "*fp32", "y": "*bf16", "tasks": "*i32", "row_ids": "*i32", "parts": "*i64", "table": "*i64",
    **dict.fromkeys(("num_in", "x_stride", "y_stride", "room", *NUMBERS), "i32"),
}  # fmt: skip
SHARED: dict[str, object] = {
    "ROWS": kernels.TASK_ROWS, "RANKS": kernels.RANKS, "SPLITS": BUILT_IN["shrink"]["SPLITS"], "WIDENS": False,
}  # fmt: skip
SHRINK = SHARED | {"DEPTH": BUILT_IN["shrink"]["DEPTH"]}
EXPAND = SHARED | {
    "WIDTH": BUILT_IN["expand"]["WIDTH"], "PARTS": 4, "IS_ALIGNED": True, "IS_WHOLE": True, "IS_EMBEDDING": False,
}  # fmt: skip


def instructions(
    kernel: triton.JITFunction,
    types: dict[str, str],
    constants: dict[str, object],
    tiles: dict[str, int],
    any_number: tuple[str, ...],
) -> str:
    """PTX for Hopper, every address and count a multiple of 16 but for those in `any_number`."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = [i for i, name in enumerate(names) if name not in constants and name not in any_number]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_stages": tiles["num_stages"], "num_warps": tiles["num_warps"], "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def main() -> None:
    shrink = instructions(kernels.shrink, TYPES, SHRINK, BUILT_IN["shrink"], NUMBERS)
    expand = instructions(kernels.expand, TYPES, EXPAND, BUILT_IN["expand"], NUMBERS)
    embedding = EXPAND | {"PARTS": 1, "IS_EMBEDDING": True}
    embed = instructions(kernels.expand, TYPES | {"h": "*i64"}, embedding, BUILT_IN["expand"], NUMBERS)
    for text in (shrink, expand, embed):
        # a tile's rows are all computed by this instruction, and by no other
        assert "mma.sync.aligned.m16n8k16" in text and "wgmma" not in text
        assert ".local" not in text, "registers ran out"
        assert not re.search(r"atom\.|\tred\.", text), "an order that changes"
    for text in (expand, embed):
        assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text
    assert "cp.async.cg.shared.global" in shrink


if __name__ == "__main__":
    main()
