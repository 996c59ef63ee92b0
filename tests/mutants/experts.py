"""Faults of experts on devices and of their adapters."""

from tests.mutants.mutant import Mutant

PAIRS_TEST = "tests/shard/model/moe/test_cuda.py::test_pairs_are_sorted_by_expert_and_adapter_and_split_into_tasks"
LOOP_TEST = "tests/shard/model/moe/test_cuda.py::test_equals_transformers_own_loop"

MUTANTS = [
    Mutant(
        "rows behind a step have the adapter of slot 0",
        "shard/batch/row_groups.py",
        "row_slots = np.full(num_rows + 1, -1, np.int32)",
        "row_slots = np.full(num_rows + 1, 0, np.int32)",
        "tests/shard/batch/test_row_groups.py::test_every_row_has_its_slot_and_rows_that_are_not_there_none",
    ),
    Mutant(
        "a token without an adapter has that of slot 0",
        "shard/model/kernels/pairs.py",
        "(slots[:, None] + 1)",
        "slots[:, None].clamp_min(0) + 1",
        f"{PAIRS_TEST}[uniform]",
    ),
    Mutant(
        "a task goes on into the next adapter's pairs",
        "shard/model/kernels/pairs.py",
        "(lasts - places).clamp_max(num_rows)",
        "(len(keys) - places).clamp_max(num_rows)",
        f"{PAIRS_TEST}[zipf]",
    ),
    Mutant(
        "results stay in the order of experts",
        "shard/model/kernels/pairs.py",
        "torch.empty_like(results).index_copy_(0, self.order, results)",
        "results",
        f"{LOOP_TEST}[zipf-mixtral-torch.float32]",
    ),
    Mutant(
        "an expert's bias is added to the pairs of others",
        "shard/model/kernels/grouped.py",
        "y.add_(biases[pairs.experts])",
        "y.add_(biases[pairs.order % len(biases)])",
        f"{LOOP_TEST}[zipf-gpt_oss-torch.float32]",
    ),
]
