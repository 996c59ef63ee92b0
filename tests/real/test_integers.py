"""What int8 and int4 cost: the log likelihood of a text under real models, next to other forms of the same weights."""

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.real import likelihood, models

pytestmark = pytest.mark.real


@cache
def mean(folder: Path, dtype: str, method: str | None) -> float:
    """Of a model of ours."""
    ids = likelihood.token_ids(folder)
    return float(likelihood.of_model(folder, ids, dtype, quantize=method).mean())


@cache
def mean_of_blocks(name: str, kind: str) -> float:
    """Of the folder off the grid with weights as the package `gguf` quantises them, the output head in Q8_0."""
    quants = pytest.importorskip("gguf.quants")
    constants = pytest.importorskip("gguf.constants").GGMLQuantizationType
    folder = models.off_grid(name)
    network = models.untied(models.network(folder, "float32"))
    head = network.get_output_embeddings()
    for module in network.modules():
        if isinstance(module, torch.nn.Linear):
            into = constants["Q8_0" if module is head else kind]
            blocks = quants.quantize(module.weight.detach().numpy(), into)
            module.weight.data = torch.from_numpy(quants.dequantize(blocks, into).copy())
    return float(likelihood.of_network(network, likelihood.token_ids(folder)).mean())


@pytest.mark.parametrize("name", models.FILES)
def test_int8_is_as_good_as_bfloat16(name: str) -> None:
    folder = models.folder(name, "bfloat16")
    plain, rounded = (mean(folder, "bfloat16", method) for method in (None, "int8"))
    assert rounded <= plain + 0.005, (plain, rounded)


@pytest.mark.parametrize("name", models.FILES)
@pytest.mark.parametrize(("method", "kind", "most"), [("int4-g32", "Q4_1", 0.0), ("int4", "Q4_0", 0.02)])
def test_int4_is_as_good_as_blocks_of_as_many_bits(name: str, method: str, kind: str, most: float) -> None:
    """The blocks without rounded activations."""
    blocks, rounded = mean_of_blocks(name, kind), mean(models.off_grid(name), "bfloat16", method)
    assert rounded <= blocks + most, (blocks, rounded)


@pytest.mark.parametrize("name", models.FILES)
def test_factors_that_move_do_not_change_the_function(name: str) -> None:
    ids = likelihood.token_ids(models.folder(name, "float32"))[:512]
    plain, moved = (
        likelihood.of_network(models.network(folder, "float32"), ids)
        for folder in (models.folder(name, "float32"), models.off_grid(name))
    )
    torch.testing.assert_close(moved, plain, rtol=1e-3, atol=1e-3)
