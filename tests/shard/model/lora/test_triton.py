"""The kernels for adapters on devices: see triton_cases.py."""

from pathlib import Path

from tests.shard.apart import KernelsApart


class TestAdapters(KernelsApart):
    cases = (Path(__file__).with_name("triton_cases.py"),)
    sample = "(specification and 33 and distinct and bfloat16) or (any_batch and 5 and bfloat16) or heads_from_a_file"
    compiles = "tests.shard.model.lora.compile_triton"

    def test_compiles_for_hopper(self) -> None:
        """In every run of all tests, for all kernels."""
        super().test_compiles_for_hopper()
