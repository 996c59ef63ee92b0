"""What a captured step launches, for every architecture on a device without values: no value is read on the host, and
no operator mixes host and device.
"""

from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lorikeet.shard.batch.inputs import Segment
from lorikeet.shard.batch.padding import Padding
from lorikeet.shard.model.kernels import grouped
from lorikeet.shard.sampling import plan
from tests import tiny
from tests.shard.engine.test_on_a_device import META, NUM_PAGES, model_of
from tests.shard.model.tape import READS

ROWS, MOST_TOKENS = 8, 128
SAMPLE = ("llama", "gemma2", "qwen3_moe", "falcon_new", "bloom")


class DeviceOnly(TorchDispatchMode):
    """Raises for an operator that reads a value on the host, or takes or gives a tensor of the host. Numbers that
    PyTorch wraps into tensors without dimensions are launch arguments.
    """

    num_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS:
            raise RuntimeError(f"{name} reads a value on the host")
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if any(leaf.device != META and leaf.dim() for leaf in leaves):
            raise RuntimeError(f"{name} takes or gives a tensor of the host")
        self.num_operators += 1
        return result


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "is_native", lambda x, matrices: True)
    monkeypatch.setitem(cast("dict[str, int]", plan._CHUNK_ELEMENTS), "meta", plan._CHUNK_ELEMENTS["cuda"])


@pytest.mark.parametrize("name", SAMPLE)
def test_a_captured_step_stays_on_the_device(name: str) -> None:
    assert_on_device(name)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(tiny.VARIANTS.keys() - set(SAMPLE)))
def test_every_captured_step_stays_on_the_device(name: str) -> None:
    assert_on_device(name)


def assert_on_device(name: str) -> None:
    model = model_of(name)
    inputs = model.inputs
    inputs.pad(Padding(ROWS, MOST_TOKENS, spare_page=NUM_PAGES - 1))
    segments = [Segment(9, 1, [1]), Segment(0, 3, [2])]
    ids = torch.empty(4, dtype=torch.long, device=META)
    inputs.fill(segments, ids, ids, range(4))
    assert inputs.bounds is not None and inputs.bounds.num_rows == 4
    with torch.inference_mode():
        model.backend.prepare(inputs)
        with DeviceOnly() as mode:
            logits = model.compute()
    assert logits.device == META and logits.shape == (4, model.info.vocab_size)
    assert mode.num_operators > 50


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + torch.arange(3),
        lambda x: x.sum().item(),
        lambda x: x.copy_(torch.zeros(3)),
        lambda x: x[x > 0],
    ],
)
def test_what_does_not_is_noticed(operation: Any) -> None:
    with DeviceOnly(), pytest.raises(RuntimeError):
        operation(torch.zeros(3, device=META))
