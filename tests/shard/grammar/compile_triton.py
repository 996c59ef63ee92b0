"""Compiles the kernel of masks for a GPU that need not be here. Run by test_triton.py."""

from lorikeet.shard.grammar import triton as kernels
from tests.shard.model.lora.compile_triton import instructions
from tests.shard.model.medusa.compile_triton import registers


def main() -> None:
    for dtype in ("*fp32", "*bf16"):
        types = {"logits": dtype, "packed": "*i32"} | dict.fromkeys(
            ("vocab_size", "logits_stride", "packed_stride"), "i32"
        )
        text = instructions(kernels.mask_tokens, types, {"WIDTH": kernels.WIDTH}, 1, any_number=("vocab_size",))
        assert " 0 bytes spill stores, 0 bytes spill loads" in registers(text), "registers ran out"
        assert "atom." not in text and "st.global" in text


if __name__ == "__main__":
    main()
