"""The fused modules for devices: see device_cases.py and device_model_cases.py."""

from pathlib import Path

from tests.shard.apart import KernelsApart


class TestFusedModules(KernelsApart):
    cases = (Path(__file__).with_name("device_cases.py"), Path(__file__).with_name("device_model_cases.py"))
    sample = (
        "(norms and bfloat16 and (Llama or Gemma2)) or (gates and 24 and bfloat16) or (attention_gets and biases)"
        " or (mix and llama and zipf)"
    )
    compiles = "tests.shard.model.fusion.compile_device"
