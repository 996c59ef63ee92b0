"""What int8 and int4 cost: the log likelihood of a text under real models, next to other forms of the same weights."""

from functools import cache

import pytest
import torch

from tests.real import likelihood, models
from tests.real.results import record

pytestmark = pytest.mark.real
BY_NAME = pytest.mark.parametrize("name", models.FILES)
ACTIVATIONS = "activations in blocks of 32"


@cache
def mean_of_blocks(name: str, kind: str) -> float:
    """Of the folder off the grid with weights as the package `gguf` quantises them, the output head in Q8_0."""
    quants = pytest.importorskip("gguf.quants")
    constants = pytest.importorskip("gguf.constants").GGMLQuantizationType
    network = models.untied(models.network(models.off_grid(name), "float32"))
    head = network.get_output_embeddings()
    for module in network.modules():
        if isinstance(module, torch.nn.Linear):
            into = constants["Q8_0" if module is head else kind]
            blocks = quants.quantize(module.weight.detach().numpy(), into)
            module.weight.data = torch.from_numpy(quants.dequantize(blocks, into).copy())
    return float(likelihood.of_network(network, likelihood.ids_of(name)).mean())


@BY_NAME
@pytest.mark.parametrize("made", [models.on_grid, models.off_grid], ids=["on the grid", "off the grid"])
def test_int8_is_as_good_as_bfloat16(name: str, made: models.MakesFolder) -> None:
    """The standard error of the difference is 0.0034 over NUM_TOKENS, and 0.002 over all of the text."""
    plain = likelihood.of_served(name, made(name), "bfloat16", likelihood.WHOLE)
    rounded = likelihood.of_served(name, made(name), "bfloat16", likelihood.WHOLE, quantize="int8")
    assert rounded.mean <= plain.mean + 0.005, (plain.mean, rounded.mean)
    if name == "smollm2" and made is models.off_grid:
        rounded = likelihood.Served(rounded.tokens[: likelihood.NUM_TOKENS - 1], rounded.num_bytes)
        record("`int8`", f"8 bits, groups of 32, {ACTIVATIONS}", rounded, float(likelihood.reference(name).mean()))


@BY_NAME
@pytest.mark.parametrize(("method", "kind", "most"), [("int4-g32", "Q4_1", 0.0), ("int4", "Q4_0", 0.02)])
def test_int4_is_as_good_as_blocks_of_as_many_bits(name: str, method: str, kind: str, most: float) -> None:
    """The blocks without rounded activations."""
    rounded = likelihood.of_served(name, models.off_grid(name), "bfloat16", quantize=method)
    blocks = mean_of_blocks(name, kind)
    assert rounded.mean <= blocks + most, (blocks, rounded.mean)
    if name == "smollm2":
        groups = "32" if method == "int4-g32" else "128, of 32 in rows of fewer than 2 048"
        computed = f"4 bits, groups of {groups}, head in 8 bits, {ACTIVATIONS}"
        record(f"`{method}`", computed, rounded, float(likelihood.reference(name).mean()))


@BY_NAME
def test_factors_that_move_do_not_change_the_function(name: str) -> None:
    ids = likelihood.ids_of(name)[:256]
    moved = likelihood.of_network(models.network(models.off_grid(name), "float32"), ids)
    torch.testing.assert_close(moved, likelihood.reference(name)[:255], rtol=1e-3, atol=1e-3)
