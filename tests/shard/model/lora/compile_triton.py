"""Compiles the kernels for a GPU that need not be here and looks at the instructions. Run by test_triton.py."""

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lorikeet.shard.model.kernels.tuning import BUILT_IN
from lorikeet.shard.model.lora import triton as kernels

NUMBERS = ("num_targets", "num_tasks", "num_parts")
TABLES = {"tasks": "*i32", "row_ids": "*i32", "parts": "*i64", "table": "*i64", "meeting": "*i32"}
TYPES = {"x": "*bf16", "h": "*fp32", "y": "*bf16"} | dict.fromkeys(
    ("num_in", "x_stride", "y_stride", "num_blocks", "room", *NUMBERS), "i32"
)
FIXED = {
    "ROWS": kernels.TASK_ROWS,
    "RANKS": kernels.RANKS,
    "SPLITS": BUILT_IN["shrink"]["SPLITS"],
    "DEPTH": BUILT_IN["shrink"]["DEPTH"],
    "WIDTH": BUILT_IN["expand"]["WIDTH"],
    "IS_ALIGNED": True,
    "WIDENS": False,
}
BOTH = {"SHRINKS": True, "EXPANDS": True, "IS_EMBEDDING": False}
EMBEDS = {"SHRINKS": False, "EXPANDS": True, "IS_EMBEDDING": True}


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
    types = TYPES | TABLES
    both = instructions(kernels.adapt, types, FIXED | BOTH, 3, any_number=NUMBERS)
    embed = instructions(kernels.adapt, types | {"x": "*i64", "h": "*i64"}, FIXED | EMBEDS, 1, any_number=NUMBERS)
    for text in (both, embed):
        # a tile's rows are all computed by this instruction, and by no other
        assert "mma.sync.aligned.m16n8k16" in text and "wgmma" not in text
        assert ".local" not in text, "registers ran out"
        assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text
    atomics = re.findall(r"atom\.[\w.]+|\tred\.[\w.]+", both)
    assert set(atomics) == {"atom.global.gpu.acq_rel.add.u32"}, f"an order that changes: {atomics}"
    assert not re.search(r"atom\.|\tred\.", embed)
    assert "cp.async.cg.shared.global" in both


if __name__ == "__main__":
    main()
