"""Compiles the kernels for experts for a GPU that need not be here and looks at the instructions. Run by
test_experts_triton.py.
"""

from shard.model import grouped_triton as grouped
from tests.shard.model.compile_triton import instructions

COUNTS = ("num_in", "num_out", "x_stride", "matrix_stride", "in_stride", "out_stride")


def products(element: str, rows: int, one: str) -> str:
    """Instructions of a product; `one`: which of the matrices' strides is 1."""
    types = dict.fromkeys(("x", "matrices", "y"), f"*{element}") | {"tasks": "*i32"}
    fixed = {"ROWS": rows, "WIDTH": grouped.WIDTH, "DEPTH": grouped.DEPTH, "WIDENS": False, one: 1}
    return instructions(grouped.multiply, types | {name: "i32" for name in COUNTS if name != one}, fixed, 3)


def main() -> None:
    for element, rows, one in (
        ("bf16", grouped.FEW_ROWS, "in_stride"),
        ("bf16", grouped.MANY_ROWS, "out_stride"),
        ("fp16", grouped.FEW_ROWS, "out_stride"),
        ("fp32", grouped.MANY_ROWS, "in_stride"),
    ):
        text = products(element, rows, one)
        assert "atom." not in text and "\tred." not in text, "an order that changes"
        assert element == "fp32" or "mma" in text
        assert ".local" not in text, "registers ran out"


if __name__ == "__main__":
    main()
