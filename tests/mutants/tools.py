"""Faults for traces and for the tools that show what a server does."""

from tests.mutants.mutant import Mutant

TRACING_TEST = "tests/router/tracing/test_tracing.py"

MUTANTS = [
    Mutant(
        "requests that are not traced keep timelines",
        "router/api/service.py",
        'timeline = None if getattr(request.state, "trace", None) is None else Timeline()',
        "timeline = Timeline()",
        f"{TRACING_TEST}::test_a_request_that_is_not_sampled_costs_less_than_a_hundredth",
    ),
    Mutant(
        "a trace does not continue its parent's",
        "router/tracing/tracing.py",
        "parent = self._propagator.extract(carrier, parent)",
        "self._propagator.extract(carrier, parent)",
        f"{TRACING_TEST}::test_the_spans_of_a_request_are_one_tree_under_its_parent",
    ),
    Mutant(
        "a first event with the role alone is a token",
        "launcher/bench/apis.py",
        "_counts_empty = False",
        "_counts_empty = True",
        "tests/launcher/bench/test_result.py::test_streams_of_each_api",
    ),
    Mutant(
        "an accepted draft counts as a step",
        "launcher/bench/apis.py",
        'seen.num_steps += not token["skipped"]',
        "seen.num_steps += 1",
        "tests/launcher/bench/test_main.py::test_every_api_counts_the_same",
    ),
]
