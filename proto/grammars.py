"""Limits of the work that a grammar may cause: equal in the router, which checks it, and the shard, which runs it."""

from llguidance import LLParserLimits

GRAMMAR_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=25_000,
    max_grammar_size=250_000,
)
"""Beyond them a grammar is an error; none of them is a time."""
