"""A sample of the tests of every Triton kernel, interpreted, in one process: imports take longer than the tests."""

import importlib.util

import pytest

from tests.shard.apart import KernelsApart, run
from tests.shard.attention import test_paged
from tests.shard.grammar import test_triton as test_masks
from tests.shard.model.fusion import test_cuda_parts
from tests.shard.model.lora import test_triton as test_lora
from tests.shard.model.medusa import test_triton as test_medusa
from tests.shard.model.moe import test_triton as test_moe
from tests.shard.model.quantization import test_eight_bits
from tests.shard.sampling import test_triton as test_sampling
from tests.shard.speculation.device import test_lookup

KINDS: tuple[type[KernelsApart], ...] = (
    test_paged.TestPaged,
    test_cuda_parts.TestFusedModules,
    test_lora.TestAdapters,
    test_medusa.TestHeads,
    test_moe.TestExperts,
    test_masks.TestMasks,
    test_eight_bits.TestEightBits,
    test_sampling.TestSampling,
    test_lookup.TestLookup,
)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_samples_in_the_interpreter() -> None:
    files = [str(path) for kind in KINDS for path in kind.cases]
    chosen = " or ".join(f"({kind.cases[0].parent.name} and ({kind.sample}))" for kind in KINDS)
    # modules are not rewritten for assertions, which takes seconds; the cases run alone show what failed
    run("pytest", "-q", "-p", "no:cacheprovider", "--assert=plain", *files, "-k", chosen, interpreted="1")


def test_every_kind_of_kernel_has_a_sample() -> None:
    assert set(KernelsApart.__subclasses__()) == set(KINDS)
    assert len({kind.cases[0].parent.name for kind in KINDS}) == len(KINDS)
