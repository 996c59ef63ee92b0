"""Quantised weights: tokens of transformers' own quantised model, equal bits for a row in any batch, few bytes."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig

from lorikeet.proto import quantization
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import load_model
from lorikeet.shard.model.kernels import integer
from lorikeet.shard.model.kv_memory import choose_num_pages
from lorikeet.shard.model.layers import PackedLinear, quantized_matrices
from lorikeet.shard.model.quantization.layers import (
    check_batch_invariance,
    is_quantized,
    loading,
    matrix_of,
    quantize_loaded,
)
from lorikeet.shard.model.quantization.matrices import QuantizedMatrix
from tests import tiny
from tests.shard.engine.exactness import compare, drive, prompts_of
from tests.shard.model import test_invariance
from tests.shard.model.quantization import packed_checkpoints
from tests.shard.model.quantization.quantized_cases import (
    AT_LOAD,
    FOUR_BITS,
    HQQ,
    IN_FILES,
    LENGTHS,
    base,
    exact_activations,
    needs,
    of_values,
    ours,
    theirs,
    write,
)
from tests.shard.near import worst_share, worst_share_of_product


def checkpoint(name: str, method: str, folder: Path, **shape: int) -> tuple[Path, str | None]:
    """A folder to serve under a method, and what to ask for: a checkpoint that is quantised says so itself."""
    plain = base(name, folder / "plain", **shape)
    if method not in IN_FILES:
        return plain, method
    packed_checkpoints.write(plain, folder / "packed", folder / "dense", method)
    return folder / "packed", None


@pytest.mark.parametrize("method", needs(*AT_LOAD))
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_transformers_own_tokens(name: str, method: str, tmp_path: Path) -> None:
    folder = base(name, tmp_path)
    if name == "gpt2" and not method.startswith("bitsandbytes"):
        with pytest.raises(ValueError, match=f"quantised by {method}: this method quantises none"):
            ours(folder, method)
        return
    prompts = prompts_of(name, LENGTHS)
    network = of_values(folder, method)
    expected = [write(network, prompt) for prompt in prompts]
    model = ours(folder, method, activations=exact_activations(method))
    tried = compare(name, expected, drive(model, prompts, step_tokens=64))
    assert tried.num_distinct >= (4 if method in HQQ else 8)
    assert tried.exact, tried
    plain = drive(ours(folder, None), prompts, 64)
    assert [text.token_ids for text in plain] != [text.token_ids for text in expected], "nothing was quantised"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", needs("bitsandbytes"))
def test_8_bits_are_multiplied_by_activations_in_blocks(method: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """A large activation rounds its own block alone."""
    network = theirs(tiny.make("llama", tmp_path), method, dtype)
    stored = network.model.layers[0].mlp.up_proj.weight
    weight = stored.data.float() * (stored.SCB / 127)[:, None]
    quantize_loaded(network, method, dtype, "cpu")
    module = network.model.layers[0].mlp.up_proj
    assert is_quantized(module) and not is_quantized(network.lm_head)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    x[::3, 7] = 100.0
    x = x.to(dtype)
    matrix = matrix_of(module, dtype)
    matrix.copy_from_mmap()
    rounded = integer.round_blocks(x)
    values = (rounded[0] * rounded[1][:, :, None]).flatten(1)
    with torch.inference_mode():
        assert worst_share_of_product(matrix(x), values @ weight.T, values, weight) <= (
            1e-6 if dtype == torch.float32 else 2**-8
        )
        assert torch.equal(matrix(x), torch.cat([matrix(row[None]) for row in x]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", needs(*AT_LOAD, *IN_FILES))
def test_equal_bits_however_a_request_is_run(method: str, dtype: str, tmp_path: Path) -> None:
    folder, expected = checkpoint("llama", method, tmp_path, hidden_size=512)
    test_invariance.check(ours(folder, expected, dtype))


MOST_BYTES = {"bitsandbytes": 1.1, "bitsandbytes-nf4": 0.65, "hqq-4bit": 0.63, "hqq-3bit": 0.56, "hqq-2bit": 0.51,
              "fp8": 1.1}  # fmt: skip
"""Bytes as a share of a weight in float32, scales included; scales of hqq and of bitsandbytes take half in 16 bits."""

STORED: dict[str, Callable[[Any], Iterable[torch.Tensor]]] = {
    "FourBitMatrix": lambda kept: (
        kept._packed, kept._state.absmax, *([kept._state.state2.absmax] if kept._state.nested else ())
    ),
    "IntegerMatrix": lambda kept: (kept.packed.packed, kept.packed.scales),
    "GroupedMatrix": lambda kept: (kept._module.W_q, kept._module.meta["scale"], kept._module.meta["zero"]),
    "Float8Matrix": lambda kept: (kept._weight.qdata, kept._weight.scale),
}  # fmt: skip
"""The tensors of a weight and its scales, by class."""


@pytest.mark.parametrize("method", needs(*MOST_BYTES))
def test_weights_stay_quantised_in_memory(method: str, tmp_path: Path) -> None:
    folder, expected = checkpoint("llama", method, tmp_path, hidden_size=256)
    model, plain = ours(folder, expected), ours(tmp_path / "plain", None)
    matrices = [module.matrix for module in model.network.modules() if isinstance(module, PackedLinear)]
    quantized = quantized_matrices(model.network)
    assert len(quantized) == 3 * 7 and len(matrices) == 3 * 7 + 1
    weights = sum(matrix.in_features * matrix.out_features for matrix in quantized)
    assert (
        sum(tensor.nbytes for matrix in quantized for tensor in STORED[type(matrix).__name__](matrix))
        <= MOST_BYTES[method] * weights
    )
    assert model.info.num_parameters == plain.info.num_parameters
    assert (model.info.quantization, plain.info.quantization) == (method, "")
    left = [parameter.numel() for parameter in model.network.parameters()]
    assert sum(left) + weights <= plain.info.num_parameters, "the plain weight is kept too"
    config = ShardConfig("m", str(folder), "unix:/dev/null", cpu_memory=2**24)
    assert choose_num_pages(config, model) == choose_num_pages(config, plain)


@pytest.mark.parametrize("method", needs("bitsandbytes", *FOUR_BITS))
def test_a_checkpoint_that_is_quantised_already(method: str, tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path / "plain")
    theirs(folder, method).save_pretrained(tmp_path / "quantised")
    settings = json.loads((tmp_path / "quantised" / "config.json").read_text())
    assert quantization.of_checkpoint(settings) == method
    prompts = prompts_of("llama", LENGTHS[:2])
    expected = drive(ours(folder, method), prompts, 64)
    for quantize in (None, method):
        outputs = drive(ours(tmp_path / "quantised", quantize), prompts, 64)
        assert [text.token_ids for text in outputs] == [text.token_ids for text in expected]
    other = next(tensor for tensor in AT_LOAD if tensor != method)
    with pytest.raises(ValueError, match=f"quantised by {method} already, and {other} was asked for"):
        ours(tmp_path / "quantised", other)


@pytest.mark.parametrize("method", needs(*FOUR_BITS))
def test_a_product_on_a_device_reads_nothing_back(method: str, tmp_path: Path) -> None:
    """Tensors without data stand in for a device's: any look at a value fails."""
    module = theirs(tiny.make("llama", tmp_path), method, torch.bfloat16).model.layers[0].mlp.up_proj
    matrix: Any = matrix_of(module, torch.bfloat16)
    for holder in (matrix, matrix._state):
        for name, held in list(vars(holder).items()):
            if isinstance(held, torch.Tensor):
                setattr(holder, name, held.to("meta"))
    x = torch.empty(1, 5, 64, dtype=torch.bfloat16, device="meta")
    with pytest.raises(RuntimeError):
        bool((x > 1).any())
    assert matrix(x).shape == (1, 5, 96) and matrix.project(x[0]).shape == (5, 96)


@pytest.mark.parametrize("method", needs(*FOUR_BITS))
def test_the_kernel_that_a_device_has_gives_the_same(method: str, tmp_path: Path) -> None:
    module = theirs(tiny.make("llama", tmp_path), method).model.layers[0].mlp.up_proj
    matrix: Any = matrix_of(module, torch.float32)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert worst_share(matrix._on_device(x, None), matrix(x)) <= 2e-2


class Seeing(QuantizedMatrix):
    """Rounds all rows to 8 bits by the largest value of any, as a scale for a whole tensor does."""

    def __init__(self) -> None:
        self.in_features, self.out_features, self.dtype, self.bias = 64, 96, torch.float32, None
        self._weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))

    def dense(self) -> torch.Tensor:
        return self._weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        step = x.abs().max() / 127
        return super().__call__((x / step).round() * step)


def test_products_that_depend_on_the_batch_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"not batch-invariant .*96 × 64 weights"):
        check_batch_invariance([Seeing()], torch.device("cpu"))
    with pytest.raises(ValueError, match="none of its layers"):
        check_batch_invariance([], torch.device("cpu"))


def test_awq_on_cuda_is_rejected_in_other_formats_than_its_kernels() -> None:
    config = LlamaConfig(quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(ValueError, match="--dtype float16"):
        loading("awq", config, torch.bfloat16, "cuda:0")
    assert loading("awq", config, torch.float16, "cuda:0") == {}
    assert loading("awq", config, torch.float32, "cpu")["config"].quantization_config["backend"] == "torch_awq"
    assert "backend" not in config.quantization_config


@pytest.mark.parametrize("method", needs("bitsandbytes"))
def test_quantised_weights_are_not_split(method: str, tmp_path: Path) -> None:
    config = ShardConfig("m", str(base("llama", tmp_path)), "unix:/dev/null", quantize=method)
    with pytest.raises(ValueError, match="llama: a network quantised by bitsandbytes cannot be split"):
        load_model(config, cast(Any, object()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", needs("fp8"))
def test_fp8_is_dequantised_as_by_torchao(method: str, dtype: torch.dtype, tmp_path: Path) -> None:
    module = theirs(base("llama", tmp_path), method, dtype).model.layers[0].mlp.up_proj
    assert torch.equal(matrix_of(module, dtype).dense(), module.weight.dequantize(dtype))
