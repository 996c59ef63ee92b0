"""Faults of tool calls."""

from tests.mutants.mutant import Mutant

WORKER = "tests/router/output/test_parser_worker.py"
PROCESS = "tests/router/output/test_parser_process.py"
GRAMMAR = "tests/router/output/test_tool_grammar.py"

MUTANTS = [
    Mutant(
        "a call of an unknown function is returned as a tool call",
        "router/output/parser_worker.py",
        "if not isinstance(name, str) or name not in names or arguments is None:",
        "if not isinstance(name, str) or arguments is None:",
        f"{WORKER}::test_an_output_is_parsed_alike_in_any_parts",
    ),
    Mutant(
        "output that is parsed again is delivered twice",
        "router/output/reader.py",
        'answer["pieces"][parse.num_pieces :]',
        'answer["pieces"]',
        f"{PROCESS}::test_a_process_that_is_killed_loses_nothing",
    ),
    Mutant(
        "the x-guidance options of a schema override the server's",
        "router/output/output_grammar.py",
        '{**schema, "x-guidance": {**OVERRIDES, "lenient": not is_strict}}',
        '{"x-guidance": {**OVERRIDES, "lenient": not is_strict}, **schema}',
        f"{GRAMMAR}::test_a_schema_cannot_weaken_its_enforcement",
    ),
    Mutant(
        "stop strings count in reasoning",
        "router/requests/generation.py",
        "if request.reasoning is not None:",
        "if request.reasoning is None:",
        "tests/router/requests/test_generation.py::test_a_stop_string_counts_in_the_answer_alone",
    ),
    Mutant(
        "a forced call may follow free text where the prompt closed the reasoning",
        "router/output/output_grammar.py",
        "if reasoning is None or reasoning.start is Start.CLOSED:",
        "if reasoning is None:",
        "tests/router/api/routes/test_added_tokens.py::test_every_finished_answer_is_valid[required-off]",
    ),
    Mutant(
        "an added token does not match its text in a grammar",
        "proto/grammars.py",
        "(base.is_special_token(token_id) and token_id not in plain_ids)",
        "base.is_special_token(token_id)",
        "tests/proto/test_grammars.py::test_an_added_token_is_the_text_that_it_stands_for",
    ),
    Mutant(
        "large numbers of a schema are rounded",
        "router/text/json_schemas.py",
        "if abs(number) > MAX_EXACT), None)",
        "if abs(number) > MAX_INTEGER), None)",
        "tests/router/text/test_json_schemas.py::test_what_cannot_be_enforced_is_named_or_left_out",
    ),
]
