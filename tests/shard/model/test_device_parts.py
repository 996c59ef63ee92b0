"""The twins for devices: see device_cases.py and device_model_cases.py."""

from pathlib import Path

from tests.shard.apart import KernelsApart


class TestTwins(KernelsApart):
    cases = (Path(__file__).with_name("device_cases.py"), Path(__file__).with_name("device_model_cases.py"))
    sample = (
        "(plain_ones and bfloat16) or left_alone or (site_gets and (llama or qwen3)) or (logits and bfloat16 and qwen3)"
        " or (mix and llama and (zipf or none)) or one_launch or twice"
    )
    compiles = "tests.shard.model.compile_device"
