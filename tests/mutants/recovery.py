"""Faults of recovery and access: streams, resumed and isolated requests, queues, secrets, salts, receipts."""

from tests.mutants.mutant import Mutant

STREAMS_TEST = "tests/router/test_kept_streams.py"
LOST_TEST = "tests/router/dispatch/test_recovery.py"

MUTANTS = [
    Mutant(
        "any caller can read a stream by its id",
        "router/kept_streams.py",
        "stream = self._streams.get((owner, stream_id))",
        "stream = next((each for each in self._streams.values() if each.id == stream_id), None)",
        f"{STREAMS_TEST}::test_streams_belong_to_their_caller",
    ),
    Mutant(
        "a stream without readers drops its buffered events",
        "router/kept_streams.py",
        "        if not self.readers:\n            return 0\n",
        "        if not self.readers:\n            self.readers = {Reader(self, self.num_events)}\n",
        f"{STREAMS_TEST}::test_a_stream_that_is_not_read_waits_at_the_bound_and_loses_nothing",
    ),
    Mutant(
        "a resumable request ends when its client disconnects",
        "router/api/streaming.py",
        "        if not self._is_read:\n            message",
        "        if True:\n            message",
        "tests/router/api/routes/test_streams.py::test_a_stream_that_nobody_reads_is_cancelled_after_its_time",
    ),
    Mutant(
        "the earlier output of a resumed request counts as prompt on the next shard",
        "router/shards/link.py",
        "num_emitted=len(generation.emitted_ids)",
        "num_emitted=0",
        f"{LOST_TEST}::test_requests_of_a_lost_shard_continue_elsewhere",
    ),
    Mutant(
        "a shard crash is not counted for the requests of its step",
        "router/dispatch/dispatcher.py",
        "if routing.wire_id in link.step_requests:",
        "if routing.wire_id in ():",
        f"{LOST_TEST}::test_a_cleared_request_survives_any_number_of_crashes",
    ),
    Mutant(
        "a request fails after its second shard crash even if it was not isolated",
        "router/requests/generation.py",
        "return was_isolated and self.num_crashes > 1",
        "return self.num_crashes > 1",
        "tests/router/requests/test_routing.py::test_successful_steps_clear_a_suspect_and_the_next_isolation_is_longer",
    ),
    Mutant(
        "an isolation step computes other requests too",
        "shard/scheduler/scheduler.py",
        "return request.isolation_steps == 0 if suspect is None else request is suspect",
        "return True",
        "tests/shard/engine/test_engine.py::test_isolated_requests_are_computed_alone_and_announced[0]",
    ),
    Mutant(
        "an isolation step starts before its announcement is sent to every router",
        "shard/grpc/streams.py",
        "            if wait_s:\n",
        "            if wait_s < 0:\n",
        "tests/shard/grpc/test_outbox.py::test_a_step_waits_until_every_stream_has_sent_it",
    ),
    Mutant(
        "the watchdog does not end a shard whose step exceeds its timeout",
        "shard/engine/engine.py",
        "if number and 0 < self._step_timeout_s <",
        "if number and 0 > self._step_timeout_s <",
        "tests/shard/engine/test_watchdog.py::test_a_step_that_hangs_ends_the_process",
    ),
    Mutant(
        "a requeued request goes to the end of the queue",
        "proto/shares.py",
        "_Place(-math.inf, -next(self._numbers), item, work)",
        "_Place(math.inf, next(self._numbers), item, work)",
        "tests/router/dispatch/test_fair_queue.py::test_of_requeued_requests_the_last_one_goes_first",
    ),
    Mutant(
        "a shard accepts any secret",
        "shard/grpc/auth.py",
        "return hmac.compare_digest(str(shown).encode(), self._expected)",
        "return True",
        "tests/shard/grpc/test_auth.py::test_calls_need_the_secret_and_health_needs_none",
    ),
    Mutant(
        "keys of prefix affinity omit the cache salt",
        "router/shards/link.py",
        "key = hash((content, salt))",
        "key = hash((content, 0))",
        "tests/router/shards/test_affinity.py::test_contents_and_salts_separate_keys",
    ),
    Mutant(
        "an isolated API key shares the prefix cache with other keys",
        "router/requests/request.py",
        'own = f"key:{self.key.name}" if self.key is not None and self.key.isolate else ""',
        'own = ""',
        "tests/router/api/routes/test_catalogue.py::test_keys",
    ),
    Mutant(
        "a request with rejection verification gets a receipt",
        "router/receipts.py",
        'if speculation.verify == "rejection":',
        'if speculation.verify == "never":',
        "tests/router/api/routes/test_receipts.py::test_a_text_verified_by_rejection_has_none",
    ),
    Mutant(
        "a router that stops while a connection to a shard ends connects again",
        "router/shards/link.py",
        "                    (ended,) = await asyncio.gather(watch, return_exceptions=True)",
        "                    ended = None\n                    try:\n                        await watch\n"
        "                    except asyncio.CancelledError:\n                        pass",
        "tests/router/shards/test_client.py::test_a_cancelled_client_ends_even_while_it_ends_a_connection",
    ),
    Mutant(
        "a token is written before an earlier one that its reader has yet to send",
        "router/requests/generation.py",
        "            or self._tokens\n",
        "",
        "tests/router/requests/test_generation.py::"
        "test_tokens_that_are_written_and_those_that_are_read_are_all_tokens_in_order",
    ),
    Mutant(
        "a router takes a stream as ended before it has read the connection for outputs",
        "router/shards/link.py",
        "            await asyncio.wait(parts, timeout=END_SECONDS)",
        "            pass",
        "tests/router/shards/test_client.py::test_all_outputs_come_before_the_end",
    ),
    Mutant(
        "messages that wait for the next one are lost with their stream",
        "router/shards/link.py",
        "            arrivals.flush()\n",
        "",
        "tests/router/shards/test_client.py::test_all_outputs_come_before_the_end",
    ),
    Mutant(
        "a connection that no stream claims stays open",
        "shard/grpc/outputs.py",
        "call_later(CLAIM_S, self._transport.abort)",
        "call_later(1000 * CLAIM_S, self._transport.abort)",
        "tests/shard/grpc/test_outputs.py::test_garbage_and_tokens_of_no_stream_are_closed",
    ),
    Mutant(
        "everyone can open the socket for outputs",
        "shard/grpc/outputs.py",
        "mask = os.umask(0o177)",
        "mask = os.umask(0)",
        "tests/shard/grpc/test_outputs.py::test_only_its_owner_can_open_the_socket",
    ),
    Mutant(
        "a shard writes to a connection without waiting for its router",
        "shard/grpc/outputs.py",
        "            await self._writable.wait()\n",
        "",
        "tests/shard/grpc/test_outputs.py::test_a_connection_that_is_not_read_ends_its_stream",
    ),
]
