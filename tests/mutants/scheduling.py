"""Faults of pages, plans and steps."""

from tests.mutants.mutant import Mutant

CACHE, SCHEDULER, REQUEST, STEP = (
    "shard/scheduler/kv_cache.py",
    "shard/scheduler/scheduler.py",
    "shard/scheduler/request.py",
    "shard/engine/step.py",
)
CACHE_TEST, ENGINE_TEST = "tests/shard/scheduler/test_kv_cache.py", "tests/shard/engine/test_engine.py"

MUTANTS = [
    Mutant(
        "the page of an activation is the base model's",
        "shard/scheduler/kv_cache.py",
        "if first <= start < first + self.page_size:",
        "if first < start - self.page_size < first + self.page_size:",
        "tests/shard/engine/test_activated_lora.py::test_the_base_model_s_pages_are_shared_up_to_the_activation",
    ),
    Mutant(
        "an activated adapter applies to the whole chunk",
        "shard/batch/inputs.py",
        "if segment.slot < 0 or num_before == 0:",
        "if segment.slot < 0 or num_before < segment.num_tokens:",
        "tests/shard/engine/test_activated_lora.py::test_every_request_gets_what_peft_gives_it_alone[chunks of 7]",
    ),
    Mutant(
        "requests with drafts split into halves that take turns",
        "shard/engine/engine.py",
        "if self.scheduler.awaits_commit:",
        "if self.scheduler.awaits_commit and self._config.commit_lag > 1:",
        "tests/shard/engine/test_commit_lag.py::test_requests_that_arrive_one_by_one_share_their_passes[lookup]",
    ),
    Mutant(
        "a prompt that is cached whole leaves no token to compute",
        REQUEST,
        "return len(self.token_ids) - 1",
        "return len(self.token_ids)",
        f"{CACHE_TEST}::test_only_full_pages_before_the_last_token_are_shared",
    ),
    Mutant(
        "a prefix hit cuts prompt log probabilities short",
        REQUEST,
        "return self.num_scored",
        "return len(self.token_ids) - 1",
        f"{ENGINE_TEST}::test_log_probabilities_of_prompt_and_output_are_complete[default]",
    ),
    Mutant(
        "a page is published before its step is committed",
        CACHE,
        "num_full = request.num_committed // self.page_size",
        "num_full = request.num_computed // self.page_size",
        f"{ENGINE_TEST}::test_a_failing_step_fails_its_requests_and_no_other[1]",
    ),
    Mutant(
        "page hashes forget the salt",
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
        "the newest token is not taken from the device",
        STEP,
        "sampler.last_tokens.index_select(0, rows)",
        "torch.zeros_like(rows)",
        f"{ENGINE_TEST}::test_every_text_is_what_it_is_alone[lag 1]",
    ),
    Mutant(
        "prompts of a flood are not counted against its part of a step",
        "shard/scheduler/budget.py",
        "self.adapter_prefill_caps[request.adapter_digest] -= num_tokens",
        "pass",
        "tests/shard/scheduler/test_budget.py::test_a_flooding_adapter_alternates_with_others_and_has_a_capped_part_of_a_step",
    ),
    Mutant(
        "a slot is taken from the least recently used adapter",
        "shard/scheduler/adapter_slots.py",
        'victim = min(idle, key=attrgetter("score"), default=None)',
        "victim = next(idle, None)",
        "tests/shard/scheduler/test_adapter_slots.py::test_the_adapter_with_the_lowest_score_gives_up_its_slot",
    ),
    Mutant(
        "the ring with the most blocks gives up its oldest",
        "shard/learning/rings.py",
        "key=lambda item: item[1].num_rows",
        "key=lambda item: len(item[1].blocks)",
        "tests/shard/learning/test_rings.py::test_every_pair_keeps_its_newest_rows_and_none_of_another",
    ),
    Mutant(
        "host memory for adapters reserves no further address space",
        "shard/model/lora/memory.py",
        "ADDRESSES = 2",
        "ADDRESSES = 1",
        "tests/shard/model/lora/test_memory.py::test_adapters_of_many_sizes_fill_the_memory_and_no_more",
    ),
    Mutant(
        "huge pages without an adapter are kept",
        "shard/model/lora/memory.py",
        "if low < high:",
        "if low < high < 0:",
        "tests/shard/model/lora/test_memory.py::test_adapters_of_many_sizes_fill_the_memory_and_no_more",
    ),
]
