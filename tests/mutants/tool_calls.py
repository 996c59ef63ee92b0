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
        "router/output/parser_process.py",
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
]
