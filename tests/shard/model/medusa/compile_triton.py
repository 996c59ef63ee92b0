"""Compiles the kernels for heads for a GPU that need not be here and looks at the instructions, for hidden rows of any
multiple of 16. Run by test_triton.py.
"""

import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from triton.backends.nvidia.compiler import get_ptxas

from lorikeet.shard.batch.row_groups import TASK_ROWS
from lorikeet.shard.model.kernels.tuning import BUILT_IN
from lorikeet.shard.model.medusa import triton as kernels
from lorikeet.shard.model.medusa.heads import MOST_HEADS
from tests.shard.model.lora.compile_triton import instructions

TYPES = {"x": "*bf16", "logits": "*bf16", "tasks": "*i32", "sources": "*i32", "places": "*i32", "table": "*i64"}
NUMBERS = ("num_rows", "num_drafts", "num_behind")
COUNTS = dict.fromkeys(("num_in", "num_out", "logits_stride", *NUMBERS), "i32")
FIXED = {"HEADS": MOST_HEADS, "ROWS": TASK_ROWS, "IS_ALIGNED": True, "WIDENS": False}


def registers(text: str) -> str:
    """What the assembler says of the registers that PTX for Hopper takes."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "kernel.ptx").write_text(text)
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr


def main() -> None:
    for kernel in (kernels.head_block, kernels.head_logits):
        tiles = BUILT_IN[kernel.__name__]
        constants = FIXED | {name: tiles[name] for name in ("WIDTH", "DEPTH")}
        text = instructions(kernel, TYPES | COUNTS, constants, tiles["num_stages"], any_number=NUMBERS)
        assert "mma.sync.aligned.m16n8k16" in text and "wgmma" not in text
        assert "atom." not in text and "\tred." not in text, "an order that changes"
        assert " 0 bytes spill stores, 0 bytes spill loads" in registers(text), "registers ran out"
        assert "cp.async.cg.shared.global" in text


if __name__ == "__main__":
    main()
