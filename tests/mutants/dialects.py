"""Faults of OpenAI's `/v1/responses` and Anthropic's `/v1/messages`."""

from tests.mutants.mutant import Mutant

RESPONSES = "tests/router/api/routes/test_responses.py"
MESSAGES = "tests/router/api/routes/test_messages.py"

MUTANTS = [
    Mutant(
        "previous_response_id, conversation and prompt are ignored instead of rejected",
        "router/schemas/responses.py",
        "    previous_response_id = conversation = prompt = Rejected(_NO_STORAGE)\n",
        "",
        f"{RESPONSES}::test_what_needs_storage_is_rejected_with_an_error",
    ),
    Mutant(
        "the done events of an item are omitted when another item begins",
        "router/api/routes/responses.py",
        "            events += self._close()\n            part",
        "            self._is_open = False\n            part",
        f"{RESPONSES}::test_the_events_of_a_stream",
    ),
    Mutant(
        "an error's param names the field of the chat route",
        "router/schemas/model.py",
        "param, error.param = error.param, own",
        "param = error.param",
        f"{RESPONSES}::test_errors_name_the_fields_of_this_route[fields7-400-max_output_tokens]",
    ),
    Mutant(
        "text before a tool result is moved behind it",
        "router/schemas/anthropic.py",
        "                _flush(messages, texts)\n",
        "",
        f"{MESSAGES}::test_a_text_before_a_result_stays_before_it",
    ),
    Mutant(
        "a stop sequence is reported as end_turn",
        "router/api/routes/messages.py",
        "if finish.kind is FinishKind.STOP and isinstance(finish.stop_reason, str):",
        "if finish.kind is FinishKind.LENGTH and isinstance(finish.stop_reason, str):",
        f"{MESSAGES}::test_why_an_answer_ends",
    ),
]
