"""Compiles the kernels for a GPU that need not be here and looks at the instructions. Run by test_triton.py."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lorikeet.shard.model.kernels.tuning import BUILT_IN
from lorikeet.shard.model.lora import triton as kernels

TABLES = {"tasks": "*i32", "row_ids": "*i32", "parts": "*i64", "table": "*i64", "num_targets": "i32", "room": "i32"}
FIXED = {
    "ROWS": kernels.TASK_ROWS,
    "RANKS": kernels.RANKS,
    "SPLITS": BUILT_IN["shrink"]["SPLITS"],
    "WIDENS": False,
}
SHRINK = {"x": "*bf16", "h": "*fp32", "num_in": "i32", "x_stride": "i32"}
EXPAND = {"h": "*fp32", "y": "*bf16", "y_stride": "i32"}
EXPAND_FIXED = {"WIDTH": BUILT_IN["expand"]["WIDTH"], "IS_ALIGNED": True, "IS_EMBEDDING": False}


def instructions(
    kernel: triton.JITFunction,
    types: dict[str, str],
    constants: dict[str, object],
    stages: int,
    any_number: tuple[str, ...] = ("num_targets",),
) -> str:
    """PTX for Hopper, every address and count a multiple of 16 but for those in `any_number`."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = [i for i, name in enumerate(names) if name not in constants and name not in any_number]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_stages": stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def main() -> None:
    shrink = instructions(kernels.shrink, SHRINK | TABLES, FIXED | {"DEPTH": BUILT_IN["shrink"]["DEPTH"]}, 3)
    expand = instructions(kernels.expand, EXPAND | TABLES, FIXED | EXPAND_FIXED, 1)
    embed = instructions(
        kernels.expand, EXPAND | TABLES | {"h": "*i64"}, FIXED | EXPAND_FIXED | {"IS_EMBEDDING": True}, 1
    )
    for text in (shrink, expand, embed):
        # a tile's rows are all computed by this instruction, and by no other
        assert "mma.sync.aligned.m16n8k16" in text and "wgmma" not in text
        assert "atom." not in text and "\tred." not in text, "an order that changes"
        assert ".local" not in text, "registers ran out"
    assert "cp.async.cg.shared.global" in shrink
    assert "ld.global.v4.b32" in expand and "st.global.v4.b32" in expand


if __name__ == "__main__":
    main()
