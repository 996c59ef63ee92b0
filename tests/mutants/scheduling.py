"""Faults of KV pages, scheduling, slots and host memory of adapters, and rings of learning."""

from tests.mutants.mutant import Mutant

CACHE, SCHEDULER, REQUEST = (
    "shard/scheduler/kv_cache.py",
    "shard/scheduler/scheduler.py",
    "shard/requests/request.py",
)
DEVICE_DRAFTS = "tests/shard/engine/test_device_drafts.py"
CACHE_TEST, ENGINE_TEST = "tests/shard/scheduler/test_kv_cache.py", "tests/shard/engine/test_engine.py"

MUTANTS = [
    Mutant(
        "page hashes include an activated adapter one page too early",
        "shard/scheduler/kv_cache.py",
        "if first <= start < first + self.page_size:",
        "if first < start - self.page_size < first + self.page_size:",
        "tests/shard/engine/test_activated_lora.py::test_the_base_model_s_pages_are_shared_up_to_the_activation",
    ),
    Mutant(
        "an activated adapter applies to the whole chunk that contains its activation",
        "shard/batch/inputs.py",
        "positions < segments.slot_starts[owners]",
        "(segments.starts + segments.counts)[owners] <= segments.slot_starts[owners]",
        "tests/shard/engine/test_activated_lora.py::test_every_request_gets_what_peft_gives_it_alone[chunks of 7]",
    ),
    Mutant(
        "requests with draft tokens run in two groups on alternate steps",
        "shard/engine/engine.py",
        "if self.scheduler.awaits_commit:",
        "if self.scheduler.awaits_commit and self._config.commit_lag > 1:",
        "tests/shard/engine/test_commit_lag.py::test_requests_that_arrive_one_by_one_share_their_passes[lookup]",
    ),
    Mutant(
        "requests whose drafts the device makes wait for their newest token",
        "shard/scheduler/scheduler.py",
        "return request.num_launched > 1  #",
        "return request.num_launched > 0  #",
        "tests/shard/engine/test_commit_lag.py::test_with_drafts_on_the_device_the_host_never_waits[lookup]",
    ),
    Mutant(
        "drafts after the last one that the device made count as accepted",
        "shard/engine/step.py",
        "if index >= len(draft_ids) or",
        "if index < len(draft_ids) and",
        f"{DEVICE_DRAFTS}::test_every_text_is_what_it_is_without[default-0.7-False]",
    ),
    Mutant(
        "a launched step keeps its position after the step before accepted drafts",
        "shard/scheduler/scheduler.py",
        "following.settle(num_accepted)",
        "following.settle(0)",
        f"{DEVICE_DRAFTS}::test_every_text_is_what_it_is_without[default-0.7-False]",
    ),
    Mutant(
        "pages of a launched step are freed with those of rejected drafts",
        "shard/scheduler/scheduler.py",
        "num_needed = 0 if following is None else following.end_of_pages",
        "num_needed = 0",
        f"{DEVICE_DRAFTS}::test_every_text_is_what_it_is_without[few pages, chunks of 7-1.0-False]",
        raises="IndexError",
    ),
    Mutant(
        "segments stay where they would be if no draft had been accepted",
        "shard/batch/segments.py",
        "table[0, is_moved] += num_accepted[self.device_rows[is_moved]].astype(np.int32)",
        "pass",
        f"{DEVICE_DRAFTS}::test_every_text_is_what_it_is_without[default-0.7-False]",
    ),
    Mutant(
        "a prefix cache hit covers the whole prompt, including its last token",
        REQUEST,
        "return len(self.token_ids) - 1",
        "return len(self.token_ids)",
        f"{CACHE_TEST}::test_only_full_pages_before_the_last_token_are_shared",
    ),
    Mutant(
        "a prefix cache hit skips prompt tokens whose log probabilities are requested",
        REQUEST,
        "return self.num_scored",
        "return len(self.token_ids) - 1",
        f"{ENGINE_TEST}::test_log_probabilities_of_prompt_and_output_are_complete[default]",
    ),
    Mutant(
        "a page enters the prefix cache before its step is committed",
        CACHE,
        "num_full = request.num_committed // self.page_size",
        "num_full = request.num_computed // self.page_size",
        f"{ENGINE_TEST}::test_a_failing_step_fails_its_requests_and_no_other[1]",
    ),
    Mutant(
        "page hashes omit the cache salt",
        CACHE,
        "names = (adapter_digest.encode(), salt.encode())",
        'names = (adapter_digest.encode(), b"")',
        f"{CACHE_TEST}::test_adapter_and_salt_keep_pages_apart",
    ),
    Mutant(
        "the oldest request is preempted",
        SCHEDULER,
        "latest = self.running[-1]",
        "latest = self.running[0]",
        f"{ENGINE_TEST}::test_the_latest_is_preempted_and_comes_back_first",
    ),
    Mutant(
        "a step reads token 0 instead of the last sampled token on the device",
        "shard/batch/device_tokens.py",
        "found = tokens.index_select(0, places.clamp(min=0)).clamp(min=0)",
        "found = torch.zeros_like(input_ids)",
        f"{ENGINE_TEST}::test_every_text_is_what_it_is_alone[lag 1]",
    ),
    Mutant(
        "prefill tokens of a capped adapter are not deducted from its prefill cap",
        "shard/scheduler/budget.py",
        "self.adapter_prefill_caps[request.adapter_digest] -= num_tokens",
        "pass",
        "tests/shard/scheduler/test_budget.py::test_a_flooding_adapter_alternates_with_others_and_has_a_capped_part_of_a_step",
    ),
    Mutant(
        "prompts of other adapters that fill many steps leave nothing for a capped adapter",
        SCHEDULER,
        "caps = {}  # nothing",
        "pass  # nothing",
        "tests/shard/scheduler/test_budget.py"
        "::test_prompts_of_other_adapters_that_fill_many_steps_alternate_with_all_prompts",
    ),
    Mutant(
        "the least recently used adapter is evicted instead of the one with the lowest score",
        "shard/scheduler/adapter_slots.py",
        'victim = min(idle, key=attrgetter("score"), default=None)',
        "victim = next(idle, None)",
        "tests/shard/scheduler/test_adapter_slots.py::test_the_adapter_with_the_lowest_score_gives_up_its_slot",
    ),
    Mutant(
        "a block is taken from the ring with the most blocks instead of the most rows",
        "shard/learning/rings.py",
        "key=lambda item: item[1].num_rows",
        "key=lambda item: len(item[1].blocks)",
        "tests/shard/learning/test_rings.py::test_every_pair_keeps_its_newest_rows_and_none_of_another",
    ),
    Mutant(
        "the adapter arena reserves no more address space than its memory size",
        "shard/model/lora/memory.py",
        "ADDRESSES = 2",
        "ADDRESSES = 1",
        "tests/shard/model/lora/test_memory.py::test_adapters_of_many_sizes_fill_the_memory_and_no_more",
    ),
    Mutant(
        "freed huge pages of the adapter arena are not returned to the system",
        "shard/model/lora/memory.py",
        "if low < high:",
        "if low < high < 0:",
        "tests/shard/model/lora/test_memory.py::test_adapters_of_many_sizes_fill_the_memory_and_no_more",
    ),
]
