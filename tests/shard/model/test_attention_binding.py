"""Where a kernel may write the keys and values of a step."""

from types import SimpleNamespace
from typing import Any, cast

import torch

from lorikeet.shard.attention import LayerKV
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.model.attention_binding import AttentionBinding


def test_no_kernel_writes_keys_and_values_that_an_adapter_replaces() -> None:
    """Else those of the embeddings of its virtual tokens would stay in the cache."""
    inputs, place = StepInputs(16, torch.device("cpu")), object()
    backend = cast(Any, SimpleNamespace(destination=lambda kv: place))
    binding = AttentionBinding(backend, inputs)
    assert binding.destination() is None
    binding.kv = cast(LayerKV, SimpleNamespace())
    assert binding.destination() is place
    rows = torch.zeros(1, dtype=torch.long)
    inputs.virtual_rows = [(0, rows, rows)]
    assert binding.destination() is place
    binding.prefixes[0] = torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)
    assert binding.destination() is None
    inputs.virtual_rows = []
    assert binding.destination() is place
