"""Compiles the paged kernels for a GPU that is not needed here, and checks the instructions. Run by test_paged.py."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lorikeet.shard.attention import paged_triton as kernels
from lorikeet.shard.attention.paged import PROGRAMS_PER_PROCESSOR
from lorikeet.shard.attention.spans import SHORT_SPANS, SPAN, short_span

POINTERS = {
    "query": "*bf16", "keys": "*bf16", "values": "*bf16", "key_scales": "*fp32", "value_scales": "*fp32",
    "sinks": "*fp32", "slopes": "*fp32", "tables": "*i32", "partials": "*fp32", "stats": "*fp32", "output": "*bf16",
    "arrived": "*i32",    "key": "*bf16", "value": "*bf16", "slots": "*i64", "scale": "fp32", "cap": "fp32",
}  # fmt: skip
MOST_SPILT = 128
"""Bytes that older versions of triton spill around the innermost loop. The sums of a tile would be 256 and more."""
LAYERS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {"KV_HEADS": 8, "GROUP": 4, "dim": 128},
    "Gemma-2-9B": {"KV_HEADS": 8, "GROUP": 2, "dim": 256, "HAS_CAP": True, "WINDOW": 4096},
    "gpt-oss-20b": {"KV_HEADS": 8, "GROUP": 8, "dim": 64, "HAS_SINKS": True, "WINDOW": 128},
    "Llama-3.1-8B fp8": {"KV_HEADS": 8, "GROUP": 4, "dim": 128, "HAS_SCALES": True},
}


def compiled(
    kernel: Any, constants: Mapping[str, object], types: Mapping[str, str] | None = None, **options: int
) -> Any:
    """For Hopper, every address and stride a multiple of 16."""
    known = POINTERS | dict(types or {})
    signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in kernel.arg_names}
    aligned = [
        i for i, name in enumerate(kernel.arg_names) if signature[name][0] == "*" or name.endswith(("row", "head"))
    ]
    source = ASTSource(kernel, signature, dict(constants), {(i,): [["tt.divisibility", 16]] for i in aligned})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def resources(kernel: Any) -> tuple[int, int]:
    """Registers of a thread, and bytes that are spilt to local memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(kernel.asm["cubin"])
        report = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", report).groups()
    return int(registers), int(stack)


def main() -> None:
    for name, layer in LAYERS.items():
        dim = layer["dim"]
        tile = kernels.tile_of(torch.bfloat16, dim, dim, (9, 0))
        has_scales = layer.get("HAS_SCALES", False)
        types = {"keys": "*fp8e4nv", "values": "*fp8e4nv"} if has_scales else {}
        shared = {"KV_HEADS": layer["KV_HEADS"], "VALUE_DIM": dim, "VALUE_WIDTH": dim}
        keyed = {"KEY_DIM": dim, "KEY_WIDTH": dim, "HAS_SCALES": has_scales}
        grouped = {"GROUP": layer["GROUP"], "HAS_SINKS": layer.get("HAS_SINKS", False)}
        attend = compiled(
            kernels.attend,
            shared | keyed | grouped
            | {"PAGE": 256, "SPAN": SPAN, "WINDOW": layer.get("WINDOW", 0), "ROWS": tile.rows, "COLUMNS": tile.columns}
            | {"SHORT": short_span(SPAN), "NUM_SHORT": SHORT_SPANS * SPAN // short_span(SPAN)}
            | {"HAS_CAP": layer.get("HAS_CAP", False), "HAS_SLOPES": False, "WIDENS": False},
            types, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        store = compiled(kernels.store, shared | keyed | {"HEADS": 8, "WIDENS": False}, types)
        for part, kernel in (("attend", attend), ("store", store)):
            ptx = kernel.asm["ptx"]
            registers, kept = resources(kernel)
            print(f"{name} {part}: {registers} registers, {kernel.metadata.shared} bytes shared, {kept} bytes spilt")
            atomics = re.findall(r"atom\.[\w.]+|\tred\.[\w.]+", ptx)
            wanted = ["atom.global.gpu.acq_rel.add.u32"] if part == "attend" else []
            assert atomics == wanted, f"atomics have no fixed order: {atomics}"
            assert ".local" not in ptx and kept <= MOST_SPILT, "registers are spilt"
            assert "ld.global.v2.b32" in ptx or "ld.global.v4.b32" in ptx or part == "attend"
        # this instruction, and no other, computes all rows of a tile
        text = attend.asm["ptx"]
        assert "wgmma.mma_async.sync.aligned.m64n" in text and "mma.sync" not in text
        if not has_scales:
            assert "cp.async.cg.shared.global" in text
        # two programs on a multiprocessor, or one of twice the size
        assert attend.metadata.shared * PROGRAMS_PER_PROCESSOR <= 227 * 1024


if __name__ == "__main__":
    main()
