"""SmolLM2 quantised by other projects' methods: as good in float32 as the values of the same weights."""

from pathlib import Path

import pytest
import torch

from tests.real import likelihood, models
from tests.real.results import record
from tests.shard.model.quantization import packed_checkpoints
from tests.shard.model.quantization.quantized_cases import needs, of_values

pytestmark = pytest.mark.real
NAME = "smollm2"
MOST = 0.005
BLOCKS, DEQUANTISED = "activations in blocks of 32", "dequantized for each product"
COMPUTED = {
    "bitsandbytes": f"8 bits, a scale per row, {BLOCKS}",
    "bitsandbytes-nf4": DEQUANTISED,
    "hqq-4bit": DEQUANTISED,
    "fp8": DEQUANTISED,
}


def compare(method: str, computed: str, served: likelihood.Served, values: torch.Tensor) -> None:
    """values: [T - 1], of the method's own values in float32."""
    own = float(values.mean())
    assert served.mean <= own + MOST, (own, served.mean)
    record(f"`{method}`", computed, served, float(likelihood.reference(NAME).mean()), own)


@pytest.mark.parametrize("method", needs(*COMPUTED))
def test_weights_that_packages_quantise(method: str) -> None:
    folder = models.folder(NAME, "float32")
    values = likelihood.of_network(of_values(folder, method), likelihood.ids_of(NAME))
    compare(method, COMPUTED[method], likelihood.of_served(NAME, folder, "float32", quantize=method), values)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_checkpoints_that_are_multiplied_as_integers(method: str, tmp_path: Path) -> None:
    """Each weight is the nearest of its group's."""
    packed, dense = tmp_path / "packed", tmp_path / "dense"
    packed_checkpoints.write(models.folder(NAME, "float32"), packed, dense, method, draw=packed_checkpoints.nearest)
    values = likelihood.of_network(models.network(dense, "float32"), likelihood.ids_of(NAME))
    served = likelihood.of_served(NAME, packed, "float32")
    compare(method, f"4 bits, groups of {packed_checkpoints.GROUP}, {BLOCKS}", served, values)
