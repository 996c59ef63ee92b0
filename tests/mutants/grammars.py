"""Faults of structured output."""

from tests.mutants.mutant import Mutant

ENGINE = "tests/shard/grammar/test_engine.py"
THREADS = "tests/shard/grammar/test_threads.py"
UNLOCKED = "tests/shard/grammar/test_unlocked.py"
BATCHES = f"{ENGINE}::test_no_draft_source_and_no_batch_changes_an_output"

MUTANTS = [
    Mutant(
        "rows after a draft token get no grammar mask",
        "shard/grammar/masks.py",
        "fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, bitmask)",
        "fill_next_token_bitmask_par(self._executor, [(matcher, row) for matcher, row, _ in drafted], bitmask)",
        f"{BATCHES}[drafts-default]",
    ),
    Mutant(
        "a constrained request is scheduled before the grammar has its newest token",
        "shard/scheduler/scheduler.py",
        "return request.constraint.is_constrained or self.proposer.may_draft(",
        "return self.proposer.may_draft(",
        f"{BATCHES}[no drafts-lag 1]",
        raises="KeyError",  # a request is computed again although a later step of it is launched
    ),
    Mutant(
        "the grammar of a resumed request does not consume its earlier output",
        "shard/grammar/matcher.py",
        "if self._output_ids and not matcher.consume_tokens(list(self._output_ids)):",
        "if self._output_ids and not self._output_ids:",
        f"{ENGINE}::test_an_output_is_continued_from_any_token",
    ),
    Mutant(
        "an output continues after its grammar is complete",
        "shard/scheduler/scheduler.py",
        "if token_id in request.stop_ids or request.constraint.commit(token_id):",
        "if token_id in request.stop_ids or (request.constraint.commit(token_id) and False):",
        f"{ENGINE}::test_an_output_matches_its_grammar_and_ends_with_it[greedy-choice]",
    ),
    Mutant(
        "a request that fails in a full shared lexer is retried in the same lexer",
        "shard/grammar/compiler.py",
        "compiling = (self._compile_apart if is_private else self._compile)(grammar.text, caller)",
        "compiling = self._compile(grammar.text, caller)",
        f"{ENGINE}::test_requests_of_one_grammar_do_not_fill_the_lexer_of_others",
    ),
    Mutant(
        "a grammar whose compilation timed out is never compiled again",
        "shard/grammar/compiler.py",
        "if done.result() is NOT_IN_TIME:",
        "if done.result() is None:",
        f"{THREADS}::test_a_grammar_that_took_too_long_is_compiled_again",
    ),
    Mutant(
        "the processor time of a slow grammar is that of the thread that waits",
        "shard/grammar/unlocked.py",
        "return time.thread_time() + (0.0 if worker is None else _processor_time(worker.thread_id))",
        "return time.thread_time()",
        f"{UNLOCKED}::test_the_time_of_the_thread_that_works_is_counted",
    ),
    Mutant(
        "a slow grammar holds the interpreter's lock",
        "shard/grammar/unlocked.py",
        "        if worker is None:\n            return bool(matcher",
        "        if worker is not None:\n            return bool(matcher",
        f"{UNLOCKED}::test_other_threads_run_meanwhile",
    ),
    Mutant(
        "a thread that works for one of the shard keeps its priority when that steps back",
        "shard/grammar/threads.py",
        "        running.thread_ids.append(thread_id)\n        if running.is_slow:",
        "        if False:",
        f"{UNLOCKED}::test_the_thread_that_works_steps_back_too",
    ),
    Mutant(
        "no router learns that every request waits for its grammar",
        "shard/grpc/streams.py",
        "return (*credit, status.expected_ms, status.is_stalled)",
        "return (*credit, status.expected_ms)",
        "tests/shard/grammar/test_slow.py::test_no_step_waits_for_a_slow_grammar",
    ),
    Mutant(
        "a router waits for a step of a shard whose requests all wait",
        "router/shards/link.py",
        "output.load.num_running > 0 and not output.load.is_stalled",
        "output.load.num_running > 0",
        "tests/router/shards/test_send_timing.py::test_a_shard_whose_requests_all_wait_for_their_grammars_is_idle",
    ),
]
