"""Faults of models on devices: ranks, out of memory, attention, padded steps, heads, fused modules, FP8 KV cache."""

from tests.mutants.mutant import Mutant

CUT_TEST = "tests/shard/model/tensor_parallel/test_partitioning.py"
READ_TEST = "tests/shard/adapters/test_ranks.py"
ENGINE_TEST = "tests/shard/engine/test_engine_memory.py"
GRAPHS_TEST = "tests/shard/model/test_graphs.py"
COMPATIBILITY_TEST = "tests/router/shards/test_discovery.py::test_a_shard_that_differs_from_the_others_is_incompatible"
FIT_TEST = "tests/shard/batch/test_padding.py::test_a_step_fits_the_least_bounds_that_hold_it"

MUTANTS = [
    Mutant(
        "a bfloat16 checkpoint keeps its dtype on a device without bfloat16",
        "shard/model/loader.py",
        "        return torch.float16\n",
        "        return dtype\n",
        "tests/shard/model/test_loader.py::test_devices_without_bfloat16_serve_float16",
    ),
    Mutant(
        "adapter slots take at least a tenth of device memory",
        "shard/model/kv_memory.py",
        "min(ADAPTER_SHARE * total, max(",
        "max(ADAPTER_SHARE * total, max(",
        "tests/shard/model/test_kv_memory.py::test_slots_for_adapters_leave_memory_to_kv",
    ),
    Mutant(
        "outputs of row-parallel layers are not summed over ranks",
        "shard/model/tensor_parallel/partitioning.py",
        "        if part.is_row_parallel:\n            module.register",
        "        if part.is_split:\n            module.register",
        f"{CUT_TEST}::test_split_over_two_it_computes_the_same[llama]",
    ),
    Mutant(
        "every rank adds the bias of a row-parallel layer",
        "shard/model/lora/partition.py",
        "return bias if self.rank == 0 else None",
        "return bias",
        f"{CUT_TEST}::test_odd_vocabularies_tied_heads_and_biases_are_split_too[overrides2]",
    ),
    Mutant(
        "the stacked gate and up projections of experts are split as one matrix",
        "shard/model/tensor_parallel/partitioning.py",
        "num_stacked = 2 if block.has_gate and not is_row else 1",
        "num_stacked = 1",
        f"{CUT_TEST}::test_split_over_two_it_computes_the_same[mixtral]",
    ),
    Mutant(
        "the second rank adds an adapter's bias again",
        "shard/model/adapters/plan.py",
        "if partition.rank > 0:",
        "if partition.rank > 1:",
        "tests/shard/model/adapters/test_loading.py::test_a_rank_reads_its_part_of_each_factor[columns-float32-blocks]",
    ),
    Mutant(
        "DoRA divides by the norm of a rank's columns instead of whole rows",
        "shard/model/adapters/loading.py",
        "squares = self._sum_over_ranks(squares)",
        "self._sum_over_ranks(squares.clone())",
        f"{READ_TEST}::test_dora_divides_by_the_norm_of_whole_rows",
    ),
    Mutant(
        "a slot is cleared on the first rank only",
        "shard/adapters/ranks.py",
        "        self._leader.send(Clear(slot))\n",
        "",
        f"{READ_TEST}::test_every_rank_gets_every_change_of_a_slot",
    ),
    Mutant(
        "requests fail instead of being retried when a step runs out of memory",
        "shard/engine/engine.py",
        "if step.is_retried:",
        "if not step.error:",
        f"{ENGINE_TEST}::test_a_step_without_memory_is_computed_again_in_smaller_ones[3-0]",
    ),
    Mutant(
        "step limits stay reduced after a step ran out of memory",
        "shard/engine/engine.py",
        "        self.scheduler.oom_backoff.on_success()\n",
        "",
        f"{ENGINE_TEST}::test_a_step_without_memory_is_computed_again_in_smaller_ones[3-0]",
    ),
    Mutant(
        "the token of a retried step still counts as in flight",
        "shard/scheduler/scheduler.py",
        "            request.num_in_flight -= item.samples\n            self._preempt(request)",
        "            self._preempt(request)",
        f"{ENGINE_TEST}::test_a_step_without_memory_is_computed_again_in_smaller_ones[3-0]",
    ),
    Mutant(
        "a layer with softcap runs on a kernel that does not support it",
        "shard/attention/varlen.py",
        'for name in ("softcap", "sinks", "alibi_slopes"):',
        'for name in ("sinks", "alibi_slopes"):',
        "tests/shard/attention/test_varlen.py::test_unsupported_layers_run_on_another_backend[soft cap]",
    ),
    Mutant(
        "a sliding window includes one token too many",
        "shard/attention/varlen.py",
        "else spec.window - 1, 0)",
        "else spec.window, 0)",
        "tests/shard/attention/test_varlen.py::test_agrees_with_the_reference[window]",
    ),
    Mutant(
        "padding rows write to page 0 instead of the spare page",
        "shard/batch/inputs.py",
        "Segment(0, count, (page_id,))",
        "Segment(0, count, (0,))",
        f"{GRAPHS_TEST}::test_rows_of_padding_write_to_the_spare_page_alone",
    ),
    Mutant(
        "every step is padded to the largest number of rows",
        "shard/batch/padding.py",
        "bisect_left(self.row_counts, max(num_rows, num_logits))",
        "-1",
        FIT_TEST,
    ),
    Mutant(
        "a step without adapters is padded as if it had some",
        "shard/batch/padding.py",
        "has_adapters or bool(num_drafts))",
        "self._has_adapters)",
        FIT_TEST,
    ),
    Mutant(
        "graphs are kept after their KV pages are freed",
        "shard/model/model.py",
        "        self.drop_graphs()\n        for binding",
        "        for binding",
        f"{GRAPHS_TEST}::test_new_pages_drop_the_graphs",
    ),
    Mutant(
        "a sliding window begins one span too late",
        "shard/attention/spans.py",
        "- kind.window + 1, 0) // span",
        "- kind.window + 1, 0) // span + 1",
        "tests/shard/attention/test_paged.py::test_every_row_sees_every_span_once[50-64-3-700]",
    ),
    Mutant(
        "two split tiles write partial results to the same rows",
        "shard/attention/spans.py",
        "taken[:num_split] - spans[:num_split] * count[:num_split]",
        "0 * taken[:num_split]",
        "tests/shard/attention/test_paged.py::test_every_row_sees_every_span_once[1000000-1000-3-None]",
    ),
    Mutant(
        "a padded step computes fewer logits than its requests need",
        "shard/batch/padding.py",
        "num_logits > min(self.most_rows, MOST_WANTED)",
        "num_logits > self.most_rows",
        FIT_TEST,
    ),
    Mutant(
        "a padded step passes its own sizes instead of its bounds to the attention kernel",
        "shard/attention/varlen.py",
        "self._most = inputs.bounds.num_rows, inputs.bounds.max_kv_len",
        "pass",
        "tests/shard/attention/test_varlen.py::test_under_bounds_shapes_and_addresses_stay",
    ),
    Mutant(
        "a draft token of a head is computed from the wrong row",
        "shard/batch/head_groups.py",
        "sources = rows[owners][order]",
        "sources = rows[owners]",
        "tests/shard/batch/test_head_groups.py::test_every_draft_token_is_in_one_task[distinct-80]",
    ),
    Mutant(
        "a fused module is used even if its output differs from the reference",
        "shard/model/fusion/verify.py",
        "return float((wanted.float() - got.float()).abs().max() / wanted.float().abs().max())",
        "return 0.0",
        "tests/shard/model/fusion/test_cpu_layer.py::test_a_layer_norm_is_no_rms_norm_however_wide[4096]",
    ),
    Mutant(
        "all tokens of a step share one FP8 scale",
        "shard/attention/reference.py",
        "largest = x.abs().amax(-1)",
        "largest = x.abs().amax((0, -1)).expand(x.shape[:-1])",
        "tests/shard/attention/test_create.py::test_the_reference_quantizes_each_token_alone",
    ),
    Mutant(
        "shards with different KV cache dtypes count as compatible",
        "router/shards/discovery.py",
        '"kv_cache_dtype", ',
        "",
        f"{COMPATIBILITY_TEST}[change5]",
    ),
    Mutant(
        "shards with different numbers of ranks count as compatible",
        "router/shards/discovery.py",
        '"num_ranks", ',
        "",
        f"{COMPATIBILITY_TEST}[change6]",
    ),
    Mutant(
        "time without requests counts as idle time of the device",
        "shard/engine/timing.py",
        'until the next step."""\n        self._started = None',
        'until the next step."""',
        "tests/shard/engine/test_timing.py::test_time_without_requests_does_not_count",
    ),
]
