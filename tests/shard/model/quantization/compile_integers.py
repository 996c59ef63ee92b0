"""Compiles the kernels for integer weights for Hopper and looks at the instructions. Run by compile_eight_bits.py."""

import re

from lorikeet.shard.model.kernels import integers_triton as kernels
from tests.shard.model.lora.compile_triton import instructions

TYPES = (
    {"x": "*bf16", "words": "*i16", "bias": "*bf16", "y": "*bf16", "counters": "*i32"}
    | dict.fromkeys(("scales", "minimums", "partials"), "*fp32")
    | dict.fromkeys(("num_rows", "num_in", "num_out", "num_blocks", "num_splits", "x_stride"), "i32")
)
ANY = ("num_rows", "num_blocks", "num_splits")


def main() -> None:
    for bits, group, size in ((4, 128, 32), (8, 0, 64)):
        for tile in (kernels.TILES[bits][0], kernels.WIDE):
            fixed = {
                "HAS_BIAS": True, "IS_PADDED": False, "BITS": bits, "GROUP": group, "RUN": 16 // bits,
                "HAS_MINIMUMS": False, "IS_EXACT": True, "ROWS": tile.rows, "OUTPUTS": tile.outputs, "SLICE": size,
            }  # fmt: skip
            text = instructions(kernels.multiply_integers, TYPES, fixed, tile.num_stages, any_number=ANY)
            assert re.search(rf"mma\.sync\.aligned\.m16n8k16|wgmma\.mma_async\.sync\.aligned\.m64n{tile.rows}k16", text)
            # words come from memory 16 bytes at a time, and from shared memory as the matrix unit takes them
            assert "cp.async.cg.shared.global" in text and "ldmatrix.sync.aligned.m8n8.x4.shared.b16" in text
            # two integers by one instruction, and none by one for each
            assert "fma.rn.bf16x2" in text and not re.search(r"cvt\.rn\.(bf16|f32)\.s", text)
            assert set(re.findall(r"atom\.[\w.]+|\tred\.[\w.]+", text)) == {"atom.global.gpu.acq_rel.add.u32"}
            assert ".local" not in text, "registers ran out"


if __name__ == "__main__":
    main()
