"""The kernel of drafts on the device: see lookup_cases.py."""

from pathlib import Path

from tests.shard.apart import KernelsApart


class TestLookup(KernelsApart):
    cases = (Path(__file__).with_name("lookup_cases.py"),)
    sample = "equal and 5 and ngrams0"
    compiles = "tests.shard.speculation.device.compile_lookup"
