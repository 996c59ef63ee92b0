"""The kernels for weights in eight and in four bits: see eight_bits_cases.py and device_integers_cases.py."""

from pathlib import Path

from tests.shard.apart import KernelsApart


class TestEightBits(KernelsApart):
    cases = tuple(
        Path(__file__).with_name(f"{name}_cases.py") for name in ("eight_bits", "four_bits", "device_integers")
    )
    sample = (
        "(dequantised and shape1 and bfloat16) or matrix_in_fp8 or matrix_of_hqq or rounded_layer"
        " or chunk_of_the_outputs or float32_is or parts_of_the_inputs or extreme_scales"
        " or (dequantised and 33 and dtype0 and (8-32 or 4-64 or 4-96)) or (numbers_of_the_dtype and dtype0)"
    )
    compiles = "tests.shard.model.quantization.compile_eight_bits"
