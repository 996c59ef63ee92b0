"""The kernel for weights in eight bits: see eight_bits_cases.py."""

from pathlib import Path

from tests.shard.apart import KernelsApart


class TestEightBits(KernelsApart):
    cases = (Path(__file__).with_name("eight_bits_cases.py"), Path(__file__).with_name("four_bits_cases.py"))
    sample = "(dequantised and shape1 and bfloat16) or matrix_in_fp8 or matrix_of_hqq"
    compiles = "tests.shard.model.quantization.compile_eight_bits"
