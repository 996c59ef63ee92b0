"""What a captured step launches, for every architecture on a device without values: no value is read on the host, and
no operator mixes host and device.
"""

from collections import Counter
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from lorikeet.shard.batch.inputs import HeadsRow, StepInputs
from lorikeet.shard.batch.padding import Padding
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.model import Model
from lorikeet.shard.model.attention_binding import NAME
from lorikeet.shard.model.build import assemble
from lorikeet.shard.model.fusion import layer
from lorikeet.shard.model.kernels import grouped
from lorikeet.shard.model.moe.experts import NAME as EXPERTS
from lorikeet.shard.model.quantization.integers import Rounding, move, round_network
from lorikeet.shard.sampling import plan
from lorikeet.shard.system import gpu
from tests import tiny
from tests.shard.engine.test_on_a_device import META, NUM_PAGES, model_of
from tests.shard.model.tape import READS

ROWS, MANY_ROWS, MOST_TOKENS = 8, 80, 128
PAGE, NUM_SLOTS = 64, 3
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


@pytest.mark.parametrize("is_fused", [False, True], ids=["modules of transformers", "kernels"])
@pytest.mark.parametrize("name", SAMPLE)
def test_a_captured_step_stays_on_the_device(name: str, is_fused: bool) -> None:
    assert_on_device(name, is_fused)


@pytest.mark.long
@pytest.mark.parametrize("is_fused", [False, True], ids=["modules of transformers", "kernels"])
@pytest.mark.parametrize("name", sorted(tiny.VARIANTS.keys() - set(SAMPLE)))
def test_every_captured_step_stays_on_the_device(name: str, is_fused: bool) -> None:
    assert_on_device(name, is_fused)


def assert_on_device(name: str, is_fused: bool) -> None:
    """`is_fused`: with fused modules, the paged kernel, and the kernels of adapters and Medusa heads."""
    if not is_fused:
        check(model_of(name), ROWS, -1, [])
        return
    pytest.importorskip("triton")
    from tests.cuda.decode_step import without_values
    from tests.cuda.launches import recorded

    with without_values(), recorded() as record, pytest.MonkeyPatch.context() as patch:
        if name == "gpt_oss":  # its MLP gives scores of experts too, so that comparing values excludes its layers
            patch.setattr(layer, "_agrees", lambda *_: False)
        model = fused_model_of(name)
        heads = [HeadsRow(row, 0, 1) for row in range(ROWS)] if model.heads.vocab_size else []
        assert model._kernels is not None and model.heads.kernels is not None
        with model._kernels.assumed_changed(0), model.heads.kernels.assumed_outputs():
            check(model, ROWS, 0, heads)
    kernels = {launch.kernel for launch in record.launches}
    assert kernels >= {"attend", "shrink", "expand"} | ({"head_block", "head_logits"} if heads else set())


@pytest.mark.parametrize("bits", [8, 4])
def test_a_captured_step_of_rounded_weights_stays_on_the_device(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of few rows reads the integers in every product, one of many rows dequantises them."""
    pytest.importorskip("triton")
    from tests.cuda.decode_step import without_values
    from tests.cuda.launches import recorded

    monkeypatch.setattr(gpu, "has_triton", lambda device: True)
    with without_values(), recorded():
        model = fused_model_of("llama", bits)
    with without_values(), recorded() as record:
        check(model, ROWS, -1, [])
    products = Counter(dict(call.constants)["BITS"] for call in record.launches if call.kernel == "multiply_integers")
    num_layers = model.network.config.num_hidden_layers
    # q, k and v in one product, out, gate and up in one, down; the output head is in 8 bits
    assert products == ({4: 4 * num_layers, 8: 1} if bits == 4 else {8: 4 * num_layers + 1})
    with without_values(), recorded() as record:
        check(model, MANY_ROWS, -1, [], num_rows=MANY_ROWS)
    assert not any(launch.kernel == "multiply_integers" for launch in record.launches)
    assert {"attend", "rotate_heads", "norm_rows", "gate_rows"} <= {launch.kernel for launch in record.launches}


def fused_model_of(name: str, bits: int = 0) -> Model:
    """`bits`: of its weights, 0 for plain ones."""
    from lorikeet.shard.attention.paged import PagedAttention  # needs Triton

    config, inputs = tiny.config_of(name), StepInputs(PAGE, META)
    with torch.device("cpu") if bits else META:
        network = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=NAME, experts_implementation=EXPERTS
        ).eval()
    if bits:
        round_network(network, Rounding(bits, rounds_activations=False), torch.device("cpu"))
        move(network, META)
    model = assemble(network, config, PagedAttention(PAGE), torch.bfloat16, inputs, MOST_TOKENS)
    model.allocate_kv(NUM_PAGES)
    model.allocate_adapters(NUM_SLOTS)
    model.enable_device_kernels(NUM_SLOTS, max_rows=4 * ROWS, max_drafts=4 * ROWS)
    return model


def check(model: Model, most_rows: int, slot: int, heads: list[HeadsRow], num_rows: int = 4) -> None:
    inputs = model.inputs
    inputs.pad(Padding(most_rows, MOST_TOKENS, spare_page=NUM_PAGES - 1, has_adapters=slot >= 0))
    segments = [Segment(9, 1, [1], slot), Segment(0, num_rows - 1, [2, 3], slot)]
    ids = torch.empty(num_rows, dtype=torch.long, device=META)
    inputs.fill(segments, ids, ids, range(num_rows), [row for row in heads if row.row < num_rows])
    assert inputs.bounds is not None and inputs.bounds.num_rows == num_rows
    with torch.inference_mode():
        model.backend.prepare(inputs)
        inputs.send()
        with DeviceOnly() as mode:
            logits = model.compute()
    assert logits.device == META and logits.shape == (inputs.bounds.num_logits, model.info.vocab_size)
    assert mode.num_operators > 10


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
