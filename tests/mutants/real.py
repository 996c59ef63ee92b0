"""Faults that real models show."""

from tests.mutants.mutant import Mutant

REAL = "tests/real"

MUTANTS = [
    Mutant(
        "norms are fused in a form that the kernels compute, whatever the network's is",
        "shard/model/fusion/parts.py",
        "if not comparison.has_same_roundings(differences[nearest], drawn.dtype):",
        "if not differences:",
        f"{REAL}/test_dtypes.py::test_sixteen_bits_cost_little[gemma3-bfloat16]",
        is_long=True,
    ),
    Mutant(
        "all blocks of a row of activations have the row's scale",
        "shard/model/kernels/integer.h",
        "static inline float round_block(",
        "static _Thread_local float largest_of_row;\nstatic inline float round_block(",
        f"{REAL}/test_gguf.py::test_published_files_are_as_good_as_their_values[smollm2]",
        more=(
            (
                "shard/model/kernels/integer.h",
                "    memcpy(&top, &largest, 4);\n",
                "    memcpy(&top, &largest, 4);\n    top = largest_of_row > top ? largest_of_row : top;\n",
            ),
            (
                "shard/model/kernels/integer.h",
                "row.offsets[g] = 0;\n",
                "row.offsets[g] = 0;\n    largest_of_row = 0;\n    for (int64_t c = 0; c < k; c++) {\n"
                "        const float v = to_float(x[c]);\n"
                "        largest_of_row = v > largest_of_row ? v : -v > largest_of_row ? -v : largest_of_row;\n    }\n",
            ),
        ),
        is_long=True,
    ),
    Mutant(
        "tensors of type Q5_0 are unknown",
        "proto/gguf/header.py",
        '6: TensorType("Q5_0", 32, 22),',
        "",
        f"{REAL}/test_gguf.py::test_published_files_are_as_good_as_their_values[gemma3]",
        is_long=True,
    ),
    Mutant(
        "a forced call may follow free text where Qwen3's prompt closed the reasoning",
        "router/output/output_grammar.py",
        "if reasoning is None or reasoning.start is Start.CLOSED:",
        "if reasoning is None:",
        f"{REAL}/test_tool_calls.py::test_every_forced_call_is_valid[required-direct]",
        is_long=True,
    ),
]
