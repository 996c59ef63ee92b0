"""Faults of kernels, and of weights in their layouts."""

from tests.mutants.mutant import Mutant

INTEGERS = "tests/shard/model/quantization/test_integers.py"
PRODUCTS, ADAPTERS = "tests/shard/model/kernels/test_cpu.py", "tests/shard/model/lora/test_targets.py"

MUTANTS = [
    Mutant(
        "the second weight of each pair is the first one again",
        "shard/model/kernels/cpu.c",
        "ADD_TERMS(R, V, both & high)",
        "ADD_TERMS(R, V, both << 16)",
        f"{PRODUCTS}::test_a_product_is_the_float32_product_rounded_once",
    ),
    Mutant(
        "a row of a packed matrix has the first element of each pair twice",
        "shard/model/kernels/cpu.c",
        "memcpy(y + c, pair + c * BLOCK, 2 * sizeof *y);",
        "y[c] = y[c + 1] = pair[c * BLOCK];",
        "tests/shard/model/test_tied_embeddings.py::test_rows_of_a_packed_matrix",
    ),
    Mutant(
        "an embedding that reads its weight itself loses the weight",
        "shard/model/kernels/packing.py",
        "    if not is_same:\n",
        "    if not is_same and len(ids) > 3:\n",
        "tests/shard/model/test_tied_embeddings.py::test_a_class_of_its_own_is_kept",
        raises="IndexError",
    ),
    Mutant(
        "rows after the first 60 are multiplied by the inputs of the first ones",
        "shard/model/kernels/cpu.c",
        "add_pairs(x + r * x_stride + 2 * p,",
        "add_pairs(x + 2 * p,",
        f"{PRODUCTS}::test_a_product_is_the_float32_product_rounded_once",
    ),
    Mutant(
        "every positive gate is 0",
        "shard/model/kernels/decoder_layer.h",
        "choose16(sign_mask16(splat16(88.f) - x), splat16(88.f), x)",
        "choose16(sign_mask16(x), splat16(88.f), x)",
        f"{PRODUCTS}::test_gates_of_any_size_are_those_of_torch",
    ),
    Mutant(
        "the last inputs of an adapter, fewer than 16, are ignored",
        "shard/model/lora/targets.c",
        "if (whole < n) {",
        "if (0) {",
        f"{ADAPTERS}::test_equals_the_specification",
    ),
    Mutant(
        "compiled layers ignore an adapter's norms",
        "shard/model/fusion/compiled.py",
        "has_others = inputs.changes_norms or (",
        "has_others = bool(",
        "tests/shard/engine/test_norms_exact.py::test_in_compiled_layers_a_request_has_the_bits_that_it_has_alone[llama]",
        raises="RuntimeError",
    ),
    Mutant(
        "requests without an adapter may choose the tokens that adapters add",
        "shard/model/adapters/added_tokens.py",
        'logits[:, self._first :] = float("-inf")',
        "pass",
        "tests/shard/engine/test_added_tokens.py::test_other_requests_get_the_bits_of_a_server_without_such_tokens",
    ),
    Mutant(
        "an adapter may choose the tokens of another one, which has more",
        "shard/model/adapters/added_tokens.py",
        "self._first : self._first + self._counts[slot]]",
        "self._first :]",
        "tests/shard/engine/test_added_tokens.py::test_other_requests_get_the_bits_of_a_server_without_such_tokens",
    ),
    Mutant(
        "the weights of a sum's second factors are ignored",
        "shard/model/lora/targets.c",
        "u[p][k] = expands[p] * end[k]",
        "u[p][k] = end[k]",
        f"{ADAPTERS}::test_a_sum_equals_the_merged_adapter_in_any_batch",
    ),
    Mutant(
        "on devices, the four bits of one input are read as those of another",
        "shard/model/kernels/device_integers.py",
        "words >> bits * part &",
        "words >> bits * (part ^ 1) &",
        f"{INTEGERS}::test_the_tokens_of_weights_in_the_layout_of_devices[int4]",
    ),
    Mutant(
        "kernels of weights in other groups are compiled when a request needs them",
        "shard/model/quantization/integers.py",
        "return *super().kind, self._integers_kind",
        "return super().kind",
        f"{INTEGERS}::test_every_kind_of_product_is_tried_at_start",
    ),
    Mutant(
        "layers in one call share the KV of the first",
        "shard/model/kernels/decoder_layer.h",
        "attend, kvs[i], step",
        "attend, kvs[0], step",
        "tests/shard/model/fusion/test_cpu_layer.py::test_all_layers_in_one_call_give_the_bits_of_the_network[llama]",
    ),
    Mutant(
        "layers of every kind have the angles of the first",
        "shard/model/kernels/decoder_layer.h",
        "angles + kinds[i]",
        "angles",
        "tests/shard/model/fusion/test_cpu_layer.py"
        "::test_all_layers_in_one_call_give_the_bits_of_the_network[gemma3_text]",
    ),
    Mutant(
        "a model's own code around its layers is dropped without a check",
        "shard/model/model.py",
        "if self.compiled is not None and not torch.equal(self._trial_logits(), expected):",
        "if False:",
        "tests/shard/model/fusion/test_cpu_layer.py"
        "::test_a_model_with_code_of_its_own_around_its_layers_is_not_compiled",
    ),
    Mutant(
        "the scale of attention in bfloat16 is a tenth too large",
        "shard/model/attention_binding.py",
        "scaling=query.shape[2] ** -0.5 if scaling is None else float(scaling),",
        "scaling=float(scaling or query.shape[2] ** -0.5) * (1.1 if query.dtype == torch.bfloat16 else 1.0),",
        "tests/shard/model/fusion/test_cpu_attention.py::test_a_whole_model_is_as_near_to_float32_as_transformers",
    ),
]
