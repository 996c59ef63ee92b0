"""Compiles the kernels for experts for a GPU that need not be here and looks at the instructions. Run by
test_triton.py.
"""

from lorikeet.shard.model.kernels import pairs_triton as pairs
from lorikeet.shard.model.kernels import products_triton as grouped
from tests.shard.model.lora.compile_triton import instructions

COUNTS = ("num_in", "num_out", "x_stride", "matrix_stride", "in_stride", "out_stride")


def products(element: str, rows: int, one: str) -> str:
    """Instructions of a product; `one`: which of the matrices' strides is 1."""
    types = dict.fromkeys(("x", "matrices", "y"), f"*{element}") | {"tasks": "*i32"}
    fixed = {"ROWS": rows, "WIDTH": grouped.WIDTH, "DEPTH": grouped.DEPTH, "WIDENS": False, one: 1}
    return instructions(grouped.multiply, types | {name: "i32" for name in COUNTS if name != one}, fixed, 3)


def split(by_expert: bool) -> str:
    types = dict.fromkeys(("keys", "tasks", "pair_ids", "num_tasks"), "*i32")
    counts = dict.fromkeys(("num_pairs", "num_halvings", "stride", "num_targets"), "i32")
    fixed = {"ROWS": 16, "BLOCK": pairs.BLOCK, "BY_EXPERT": by_expert}
    return instructions(pairs.split_pairs, types | counts, fixed, 1)


def main() -> None:
    for by_expert in (False, True):
        assert ".local" not in split(by_expert), "registers ran out"
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
