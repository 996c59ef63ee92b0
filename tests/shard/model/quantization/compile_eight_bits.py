"""Compiles the kernels for weights in eight bits, and for integers of eight and four, for Hopper and looks at the
instructions. Run by test_eight_bits.py.
"""

from lorikeet.shard.model.kernels import eight_bits_triton as kernel
from tests.shard.model.lora.compile_triton import instructions
from tests.shard.model.quantization import compile_integers

COUNTS = dict.fromkeys(("num_rows", "num_in", "num_out", "x_stride"), "i32")
FIXED = {
    "HAS_BIAS": True,
    "IS_ENCODED": False,
    "ROWS": kernel.ROWS,
    "WIDTH": kernel.WIDTH,
    "DEPTH": kernel.DEPTH,
    "WIDENS": False,
}


def main() -> None:
    for element in ("fp8e4nv", "i8"):
        types = {
            "x": "*bf16",
            "weight": f"*{element}",
            "scales": "*fp32",
            "bias": "*bf16",
            "y": "*bf16",
        }
        text = instructions(kernel.multiply_8bit, types | COUNTS, FIXED, 4, any_number=("num_rows",))
        # a tile's rows are all computed by this instruction, and by no other
        assert "mma.sync.aligned.m16n8k16" in text and "wgmma" not in text
        assert "atom." not in text and "\tred." not in text, "an order that changes"
        assert ".local" not in text, "registers ran out"
        assert "cp.async.cg.shared.global" in text


if __name__ == "__main__":
    main()
    compile_integers.main()
