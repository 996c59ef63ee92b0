"""Faults of the kernels of mixture-of-experts layers, and of adapters on experts."""

from tests.mutants.mutant import Mutant

PAIRS_TEST = "tests/shard/model/moe/test_cuda.py::test_pairs_are_sorted_by_expert_and_adapter_and_split_into_tasks"
LOOP_TEST = "tests/shard/model/moe/test_cuda.py::test_equals_transformers_own_loop"

MUTANTS = [
    Mutant(
        "rows beyond the end of a step use the adapter in slot 0",
        "shard/batch/row_groups.py",
        "extended(slots, num_rows + 1, -1)",
        "extended(slots, num_rows + 1, 0)",
        "tests/shard/batch/test_row_groups.py::test_every_row_has_its_slot_and_rows_that_are_not_there_none",
    ),
    Mutant(
        "a token without an adapter uses the adapter in slot 0",
        "shard/model/kernels/pairs.py",
        "(slots[:, None] + 1)",
        "slots[:, None].clamp_min(0) + 1",
        f"{PAIRS_TEST}[uniform]",
    ),
    Mutant(
        "a task includes pairs of the next adapter or expert",
        "shard/model/kernels/pairs.py",
        "(lasts - places).clamp_max(num_rows)",
        "(len(keys) - places).clamp_max(num_rows)",
        f"{PAIRS_TEST}[zipf]",
    ),
    Mutant(
        "expert outputs keep the order of experts instead of tokens",
        "shard/model/kernels/pairs.py",
        "torch.empty_like(results).index_copy_(0, self.order, results)",
        "results",
        f"{LOOP_TEST}[zipf-mixtral-torch.float32]",
    ),
    Mutant(
        "the bias of an expert is added to tokens of other experts",
        "shard/model/kernels/grouped.py",
        "y.add_(biases[pairs.experts])",
        "y.add_(biases[pairs.order % len(biases)])",
        f"{LOOP_TEST}[zipf-gpt_oss-torch.float32]",
    ),
]
