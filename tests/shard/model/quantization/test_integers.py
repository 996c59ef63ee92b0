"""Weights rounded at load (int8, int4): the same bits as the arithmetic in torch, in any batch, and near transformers'
own network of the rounded weights.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from lorikeet.proto import quantization
from lorikeet.shard import model as model_package
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import Model, load_model
from lorikeet.shard.model.kernels import integer
from lorikeet.shard.model.kernels.device_integers import DeviceIntegers
from lorikeet.shard.model.kernels.integer import IntegerWeight
from lorikeet.shard.model.layers import PackedLinear, quantized_matrices
from lorikeet.shard.model.loader import load_network, read_config
from lorikeet.shard.model.moe.experts import PackedExperts, is_experts
from lorikeet.shard.model.quantization import integers
from lorikeet.shard.model.quantization.integers import IntegerLinear, IntegerMatrix, Rounding, round_weight
from lorikeet.shard.model.quantization.layers import check_batch_invariance
from tests import tiny
from tests.shard.engine.exactness import NEW_TOKENS, compare, drive, prompts_of
from tests.shard.model import test_invariance
from tests.shard.model.quantization.quantized_cases import LENGTHS, write

METHODS = quantization.INTEGERS
SIZES: dict[str, dict[str, int]] = {
    "gpt2": {},
    "llama": {"intermediate_size": 128},
    "mixtral": {"intermediate_size": 128},
}


@pytest.fixture(autouse=True)
def large_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """int4 has groups of 128 in short rows too."""
    monkeypatch.setattr(integers, "LEAST_ROW", 0)


def sample(cases: list[tuple[str, ...]], *kept: tuple[str, ...]) -> list[Any]:
    """Those cases; all but `kept` are marked `long`."""
    return [pytest.param(*case, marks=() if case in kept else pytest.mark.long, id="-".join(case)) for case in cases]


def ours(folder: Path, method: str | None, dtype: str = "float32", activations: str | None = None) -> Model:
    return load_model(
        ShardConfig(
            "m", str(folder), "unix:/dev/null", dtype=dtype, quantize=method, quantize_activations=activations
        )
    )  # fmt: skip


def dense(rows: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """[out, in] a weight after rounding. In 8 bits by another formula; the search for 4 bits has tests of its own."""
    if bits == 4:
        return round_weight(rows, bits, group).dense()
    parts = rows.reshape(-1, group)
    least = parts.amin(1, keepdim=True)
    scale = (parts.amax(1, keepdim=True) - least) / 255
    return (((parts - least) / scale).round() * scale + least).reshape(rows.shape)


def theirs(folder: Path, bits: int, group: int) -> Any:
    """transformers' network of the rounded weights, in float32."""
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, module in network.named_modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(dense(module.weight, *((8, 32) if name == "lm_head" else (bits, group))))
            elif isinstance(module, Conv1D):
                module.weight.copy_(dense(module.weight.t(), bits, group).t())
            elif is_experts(module):
                for parameter in (module.gate_up_proj, module.down_proj):
                    parameter.copy_(torch.stack([dense(one, bits, group) for one in parameter]))
    return network


@pytest.mark.parametrize(
    ("name", "method"), sample([(name, method) for name in SIZES for method in METHODS], ("llama", "int4"))
)
def test_the_tokens_of_the_rounded_weights(name: str, method: str, tmp_path: Path) -> None:
    folder = tiny.make(name, tmp_path, **SIZES[name])
    prompts = prompts_of(name, LENGTHS)
    network = theirs(folder, *METHODS[method])
    expected = [write(network, prompt) for prompt in prompts]
    kept = compare(name, expected, drive(ours(folder, method, activations="none"), prompts, step_tokens=64))
    assert kept.exact and kept.num_distinct >= 8, kept


@pytest.mark.parametrize("method", METHODS)
def test_the_tokens_of_weights_in_the_layout_of_devices(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor: without Triton, every product dequantises the weight."""
    monkeypatch.setattr(IntegerLinear, "is_on_device", True)
    monkeypatch.setattr(model_package, "check_batch_invariance", lambda *_: None)  # torch's products
    folder = tiny.make("llama", tmp_path, **SIZES["llama"])
    prompts = prompts_of("llama", LENGTHS)
    network = theirs(folder, *METHODS[method])
    expected = [write(network, prompt) for prompt in prompts]
    model = ours(folder, method, activations="none")
    matrices: list[Any] = quantized_matrices(model.network)
    assert len(matrices) == 7 * 3 + 1 and all(isinstance(module._packed, DeviceIntegers) for module in matrices)
    kept = compare("llama", expected, drive(model, prompts, step_tokens=64))
    assert kept.exact and kept.num_distinct >= 8, kept


def test_every_kind_of_product_is_tried_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the bias of those that have one."""
    tried: list[tuple[int, int, bool]] = []

    def multiply(matrix: IntegerMatrix, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        tried.append((matrix.weight.bits, matrix.weight.group, bias is None))
        return x

    monkeypatch.setattr(IntegerMatrix, "product", multiply)
    plain, bias = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), torch.zeros(64)
    in_eight, in_four = (round_weight(plain, bits) for bits in (8, 4))
    coarse = IntegerWeight(4, in_four.values, in_four.scales[:, :1])
    weights = [(in_eight, None), (in_four, None), (in_four, bias), (in_four, bias), (coarse, None)]
    check_batch_invariance(
        [IntegerMatrix(IntegerLinear(*weight, False, torch.float32), torch.float32) for weight in weights],
        torch.device("cpu"),
    )
    assert set(tried) == {(8, 32, True), (4, 32, True), (4, 32, False), (4, 64, True)}


def test_experts_are_rejected_on_devices(tmp_path: Path) -> None:
    config = ShardConfig("m", str(tiny.make("mixtral", tmp_path)), "unix:/dev/null", device="cuda:0")
    with pytest.raises(ValueError, match="quantised by int4: mixture-of-experts models are supported on CPU only"):
        load_network(config, read_config(config), torch.bfloat16, "int4", is_whole=False)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_the_tokens_of_rounded_activations(method: str, tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path, **SIZES["llama"])
    prompts = prompts_of("llama", LENGTHS)
    network = theirs(folder, *METHODS[method])
    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(_round)
    expected = [write(network, prompt) for prompt in prompts]
    tried = compare("llama", expected, drive(ours(folder, method), prompts, step_tokens=64))
    # float32 sums in another order move a few activations by a 127th
    assert tried.num_tokens >= 0.8 * NEW_TOKENS * len(prompts), tried


def _round(_: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
    blocks = args[0].unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / scale).round() * scale).flatten(-2)


@pytest.mark.parametrize(
    ("name", "method", "dtype"),
    sample(
        [
            (*case, dtype)
            for case in (("llama", "int8"), ("gpt2", "int4"), ("mixtral", "int4"))
            for dtype in ("float32", "bfloat16")
        ],
        ("llama", "int8", "bfloat16"),
        ("mixtral", "int4", "float32"),
    ),
)
def test_compiled_products_have_the_bits_of_torch(
    name: str, method: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.make(name, tmp_path, **SIZES[name])
    ids = torch.randint(0, tiny.VOCAB, (40,), generator=torch.Generator().manual_seed(0))
    logits = []
    for is_compiled in (True, False):
        monkeypatch.setattr(integer, "available", lambda is_compiled=is_compiled: is_compiled)
        model = ours(folder, method, dtype)
        model.allocate_kv(4)
        logits.append(test_invariance.logits_of(model, [(0, [0, 1, 2], ids)])[0])
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("method", "activations", "dtype"),
    sample(list(product(METHODS, ("int8", "none"), ("float32", "bfloat16"))), ("int4", "int8", "bfloat16")),
)
def test_equal_bits_however_a_request_is_run(method: str, activations: str, dtype: str, tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path, hidden_size=512, intermediate_size=128)
    test_invariance.check(ours(folder, method, dtype, activations))


@pytest.mark.parametrize("method", sample([(method,) for method in METHODS], ("int4",)))
def test_what_is_rounded(method: str, tmp_path: Path) -> None:
    """Every linear layer by the method, the head to 8 bits, no embedding; a tied head is a second copy of few bytes."""
    for is_tied in (False, True):
        folder = tiny.make(
            "llama", tmp_path / str(is_tied), hidden_size=256, intermediate_size=128, tie_word_embeddings=is_tied
        )
        model, plain = ours(folder, method, "bfloat16"), ours(folder, None, "bfloat16")
        matrices: list[Any] = quantized_matrices(model.network)
        assert len(matrices) == 3 * 5 + 1  # q, k and v are one
        assert not [module for module in model.network.modules() if isinstance(module, nn.Linear)]
        head = model.network.lm_head
        assert isinstance(head, PackedLinear) and head.matrix in matrices
        for matrix in matrices:
            size = matrix.in_features * matrix.out_features
            bits, group = (8, 32) if matrix is head.matrix else METHODS[method]
            # 4 bytes of a scale and as many of a minimum
            assert matrix.nbytes == size * bits // 8 + size // group * 8
            assert matrix._weight is None, "the weight is kept in another layout too"
        assert model.network.model.embed_tokens.weight.dtype == torch.bfloat16
        assert model.info.num_parameters == plain.info.num_parameters
        left = sum(parameter.numel() for parameter in model.network.parameters())
        assert left <= tiny.VOCAB * 256 + 7 * 256


@pytest.mark.parametrize("name", sample([("mixtral",), ("qwen3_moe",), ("gpt_oss",)], ("mixtral",)))
def test_experts_are_rounded_and_routers_are_not(name: str, tmp_path: Path) -> None:
    model = ours(tiny.make(name, tmp_path, moe_intermediate_size=64, intermediate_size=64), "int4")
    blocks = [getattr(module, "lorikeet_experts", None) for module in model.network.modules()]
    blocks = [experts for experts in blocks if isinstance(experts, PackedExperts)]
    matrices = [one for block in blocks for part in block.matrices.values() for one in part]
    assert len(matrices) >= 2 * 4 * 2 and all(isinstance(one, IntegerMatrix) for one in matrices)
    rounded = [name for name, module in model.network.named_modules() if isinstance(module, PackedLinear)]
    assert not [name for name in rounded if name.endswith(("gate", "router"))]


def test_rounding_a_row_of_zeros() -> None:
    weight = torch.zeros(3, 64)
    weight[1] = torch.linspace(-1, 2, 64)
    for bits in (8, 4):
        assert torch.equal(round_weight(weight, bits).dense()[[0, 2]], torch.zeros(2, 64))


def test_a_group_of_equal_weights_is_exact() -> None:
    weight = torch.full((2, 64), 0.3)
    weight[1, :32] = -1e-30
    for bits in (8, 4):
        assert torch.equal(round_weight(weight, bits).dense(), weight)


@pytest.mark.parametrize("group", [32, 128])
def test_four_bits_are_nearer_than_between_the_extremes(group: int) -> None:
    """Of every group the rounded weight is not further than with the first scale that comes to mind."""
    weight = torch.randn(200, 256, generator=torch.Generator().manual_seed(0))
    weight[::2] += 3  # far from zero
    weight[:50, ::32] *= 5
    weight *= torch.logspace(-4, 4, 200)[:, None]
    parts = weight.reshape(-1, group)
    least, largest = parts.amin(1, keepdim=True), parts.amax(1, keepdim=True)
    scale = (largest - least) / 15
    plain = (((parts - least) / scale).round() * scale + least - parts).square().sum(1)
    rounded = round_weight(weight, 4, group)
    assert rounded.group == group and rounded.values.max() == 15
    error = (rounded.dense().reshape(-1, group) - parts).square().sum(1)
    assert (error <= plain * 1.0001).all() and error.div(plain).mean() < 0.9


def test_short_rows_have_groups_of_32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    sizes = {num_in: Rounding(4, True, 128).round(torch.randn(2, num_in)).group for num_in in (2048, 2080, 1920, 256)}
    assert sizes == {2048: 128, 2080: 32, 1920: 32, 256: 32}


def test_the_largest_group_that_divides_a_row() -> None:
    sizes = {num_in: round_weight(torch.randn(2, num_in), 4, 128).group for num_in in (256, 576, 96, 32)}
    assert sizes == {256: 128, 576: 32, 96: 32, 32: 32}
    assert [round_weight(torch.randn(2, num_in), 8).group for num_in in (256, 72)] == [32, 72]


@pytest.mark.parametrize("method", METHODS)
def test_weights_that_cannot_be_rounded(method: str, tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path / "odd", hidden_size=72, intermediate_size=96)
    if method.startswith("int4"):
        with pytest.raises(ValueError, match=r"q_proj: its rows have 72 weights, which is no multiple of 32"):
            ours(folder, method)
    else:
        ours(folder, method)
    network: Any = AutoModelForCausalLM.from_pretrained(tiny.make("llama", tmp_path / "plain", intermediate_size=128))
    network.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.inf
    network.save_pretrained(tmp_path / "infinite")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj: it has weights that are not finite"):
        ours(tmp_path / "infinite", method)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_rejected(method: str, tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path)
    config = ShardConfig("m", str(folder), "unix:/dev/null", quantize=method)
    with pytest.raises(ValueError, match=f"a network quantised by {method} cannot be split"):
        load_model(config, object())  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="only int8, int4, int4-g32, gguf, bitsandbytes, and checkpoints of gptq and awq whose"
    ):
        ours(folder, None, activations="int8")


def test_receipts_name_the_activations() -> None:
    assert quantization.describe("int8", "int8") == "int8"
    assert quantization.describe("int4", "none") == "int4, activations none"
    assert quantization.describe("gptq", "none") == "gptq" and quantization.describe(None, "none") == ""
    assert quantization.describe("gptq", "int8") == "gptq, activations int8"
