"""Experts as devices compute them, on CPU: against transformers' own loop, alone and inside a model."""

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from lorikeet.shard import attention
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.row_groups import most_tasks
from lorikeet.shard.model import layers
from lorikeet.shard.model.attention_binding import NAME
from lorikeet.shard.model.build import assemble
from lorikeet.shard.model.kernels import grouped
from lorikeet.shard.model.kernels.pairs import SortedPairs, sort_pairs, tasks_of
from lorikeet.shard.model.moe.experts import NAME as EXPERTS
from lorikeet.shard.model.moe.experts import Experts, is_experts, place_experts
from lorikeet.shard.model.probe import LENGTHS, _in_chunks
from lorikeet.shard.system import gpu
from tests import tiny

MIXTURES = ["mixtral", "qwen3_moe", "gpt_oss"]
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def network_of(name: str, dtype: torch.dtype, implementation: str = "eager") -> Any:
    """A tiny random model; the same for every implementation."""
    torch.manual_seed(3)
    network = AutoModelForCausalLM.from_config(tiny.config_of(name), dtype=torch.float32)
    tiny.scale(network)
    network.config._experts_implementation = implementation
    return network.to(dtype).requires_grad_(False).eval()


def block_of(name: str, dtype: torch.dtype) -> Any:
    """One block of experts, with a bias where it has any."""
    return next(module for module in network_of(name, dtype).modules() if is_experts(module))


def chosen(num_tokens: int, num_experts: int, pattern: str) -> torch.Tensor:
    """[num_tokens, 2] different experts of each token."""
    generator = torch.Generator().manual_seed(num_tokens)
    if pattern == "identical":
        return torch.tensor([[1, 3]]).expand(num_tokens, 2).contiguous()
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    if pattern == "zipf":
        scores += 1 / (1 + torch.arange(num_experts))
    return scores.topk(2).indices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("pattern", ["uniform", "zipf", "identical"])
def test_equals_transformers_own_loop(name: str, pattern: str, dtype: torch.dtype) -> None:
    """For float32 the loop computes in float64: its own float32 sums depend on the processor."""
    block = block_of(name, dtype)
    wide = torch.float64 if dtype == torch.float32 else dtype
    plain = block_of(name, wide)
    generator = torch.Generator().manual_seed(0)
    for num_tokens in (1, 2, 19):
        x = torch.randn(num_tokens, 64, generator=generator).to(dtype)
        ids = chosen(num_tokens, block.num_experts, pattern)
        weights = torch.rand(num_tokens, 2, generator=generator).to(dtype)
        expected = plain(x.to(wide), ids, weights.to(wide)).to(dtype)
        torch.testing.assert_close(
            Experts(block)(block, x, ids, weights), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("name", MIXTURES)
def test_torch_s_own_product_of_groups_gives_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = block_of(name, torch.bfloat16)
    x, ids, weights = torch.randn(9, 64).bfloat16(), chosen(9, block.num_experts, "zipf"), torch.rand(9, 2)
    plain = Experts(block)(block, x, ids, weights)
    monkeypatch.setattr(grouped, "multiply_reference", None)
    monkeypatch.setattr(grouped, "_is_host", lambda device: False)
    monkeypatch.setattr(gpu, "_assumed", [(9, 0)])
    with NoHostReads():
        got = Experts(block)(block, x, ids, weights)
    torch.testing.assert_close(got, plain, rtol=2**-6, atol=2**-6)


class NoHostReads(TorchDispatchMode):
    """Refuses what waits for a device's values, which a graph cannot hold."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        assert packet not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.bincount)
        return func(*args, **(kwargs or {}))


def test_which_products_torch_computes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere its own would wait for the device, or refuse."""
    x, matrices = torch.zeros(4, 64).bfloat16(), torch.zeros(3, 64, 32).bfloat16()
    for capability, expected in (((9, 0), True), ((10, 0), True), ((8, 0), False), ((12, 0), False)):
        monkeypatch.setattr(gpu, "_assumed", [capability])
        assert grouped.is_native(x, matrices) is expected
    monkeypatch.setattr(gpu, "_assumed", [(9, 0)])
    assert grouped.is_native(x, matrices.mT.contiguous().mT)
    assert not grouped.is_native(x.float(), matrices.float()) and not grouped.is_native(x.half(), matrices.half())
    assert not grouped.is_native(x, torch.zeros(3, 64, 33).bfloat16())


def plain_tasks(pairs: SortedPairs, values: list[int], num_rows: int) -> list[list[int]]:
    actual: list[list[int]] = []
    keys = pairs.keys.tolist()
    for place, (key, value) in enumerate(zip(keys, values, strict=True)):
        if value < 0:
            continue
        if not actual or keys[actual[-1][1]] != key or actual[-1][2] == num_rows:
            actual.append([value, place, 0])
        actual[-1][2] += 1
    return actual


def of_tokens(slots: str, num_tokens: int) -> torch.Tensor:
    """[num_tokens] int32 the slot of each token, -1 for none."""
    numbers = torch.arange(num_tokens)
    return {
        "distinct": numbers, "uniform": numbers % 5 - 1, "zipf": 40 // (1 + numbers),
        "identical": torch.full((num_tokens,), 7), "none": torch.full((num_tokens,), -1),
    }[slots].int()  # fmt: skip


@pytest.mark.parametrize("slots", ["distinct", "uniform", "zipf", "identical", "none"])
def test_pairs_are_sorted_by_expert_and_adapter_and_split_into_tasks(slots: str) -> None:
    num_tokens, num_experts, num_slots = 45, 4, 64
    of_token = of_tokens(slots, num_tokens)
    ids = chosen(num_tokens, num_experts, "zipf")
    with NoHostReads():
        pairs = sort_pairs(ids, num_experts, of_token, num_slots)
        values = torch.where(pairs.slots >= 0, pairs.slots * 10 + pairs.experts, -1)
        most = most_tasks(90, num_experts * num_slots, 16)
        tasks = tasks_of(pairs.keys, values, 16, most)
    assert torch.equal(pairs.experts.long(), ids.flatten()[pairs.order])
    assert torch.equal(pairs.slots, of_token[pairs.order // 2])
    assert pairs.ends.tolist() == [int((ids <= expert).sum()) for expert in range(num_experts)]
    expected = plain_tasks(pairs, values.tolist(), 16)
    assert tasks.tolist() == expected + [[0, 0, 0]] * (most - len(expected))
    assert torch.equal(pairs.unsort(ids.flatten()[pairs.order, None])[:, 0], ids.flatten())


@pytest.mark.parametrize("name", MIXTURES)
def test_a_model_with_plain_experts_gives_transformers_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "can_pack", lambda dtype: False)
    plain = network_of(name, torch.float32)
    rows = [torch.randint(0, tiny.VOCAB, (length,)) for length in LENGTHS]
    with torch.inference_mode():
        expected = [plain(row[None], use_cache=False).logits[0] for row in rows]
        ours = network_of(name, torch.float32, EXPERTS)
        ours.config._attn_implementation = NAME
        backend = attention.create("auto", CPU, torch.float32, None)
        inputs = StepInputs(backend.page_size, CPU)
        model = assemble(ours, copy.deepcopy(ours.config), backend, torch.float32, inputs, max(LENGTHS))
        got = _in_chunks(model, rows)
    assert sum(isinstance(module, Experts) for module in ours.modules()) == (2 if name == "qwen3_moe" else 3)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_blocks_of_an_older_transformers_are_served() -> None:
    """5.17 has neither of these attributes."""
    network = network_of("mixtral", torch.float32)
    block: Any = next(module for module in network.modules() if is_experts(module))
    for name in ("has_post_expert_norm", "_is_expert_parallel"):
        vars(block).pop(name, None)
        assert not hasattr(block, name)
    place_experts(network)
    assert isinstance(block.lorikeet_experts, Experts)


def test_experts_with_a_norm_are_rejected() -> None:
    network = network_of("mixtral", torch.float32)
    block: Any = next(module for module in network.modules() if is_experts(module))
    block.has_post_expert_norm = True
    with pytest.raises(ValueError, match="experts with a norm"):
        place_experts(network)
