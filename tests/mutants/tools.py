"""Faults of traces, of the reported tier of an adapter, and of the benchmark client."""

from tests.mutants.mutant import Mutant

TRACING_TEST = "tests/router/test_request_tracing.py"

MUTANTS = [
    Mutant(
        "a request that is not traced records a timeline",
        "router/api/prepare.py",
        'timeline = None if request.scope["state"].get("trace") is None else Timeline()',
        "timeline = Timeline()",
        f"{TRACING_TEST}::test_a_request_that_is_not_sampled_costs_less_than_a_hundredth",
    ),
    Mutant(
        "a trace ignores the parent in the traceparent header",
        "router/request_tracing.py",
        "parent = self._propagator.extract(carrier, parent)",
        "self._propagator.extract(carrier, parent)",
        f"{TRACING_TEST}::test_the_spans_of_a_request_are_one_tree_under_its_parent",
    ),
    Mutant(
        "a first event that has only the role counts as a token",
        "launcher/bench/load.py",
        "_counts_empty = False",
        "_counts_empty = True",
        "tests/launcher/bench/test_result.py::test_streams_of_each_api",
    ),
    Mutant(
        "an accepted draft token counts as a step",
        "launcher/bench/load.py",
        'seen.num_steps += not token["skipped"]',
        "seen.num_steps += 1",
        "tests/launcher/bench/test_main.py::test_every_api_counts_the_same",
    ),
    Mutant(
        "the tier of an adapter in host memory is reported as disk",
        "router/shards/link.py",
        'return "host" if all(held) else elsewhere',
        "return elsewhere",
        "tests/router/api/routes/test_adapters.py::test_the_tier_says_where_the_adapter_was",
    ),
    Mutant(
        "gaps between tokens of one request are resampled as if independent",
        "launcher/bench/presentation.py",
        "values = [list(values_of(*row)) for error, *row in rows if not error]",
        "values = [[each] for error, *row in rows if not error for each in values_of(*row)]",
        "tests/launcher/bench/test_result.py::test_gaps_of_a_request_are_drawn_together",
    ),
]
