"""All faults that are planted on purpose."""

from tests.mutants import (
    devices,
    dialects,
    embeddings,
    experts,
    grammars,
    integers,
    recovery,
    sampling,
    scheduling,
    speculation,
    tool_calls,
    tools,
)

FAULTS = [
    *sampling.MUTANTS,
    *scheduling.MUTANTS,
    *speculation.MUTANTS,
    *grammars.MUTANTS,
    *tools.MUTANTS,
    *dialects.MUTANTS,
    *embeddings.MUTANTS,
    *tool_calls.MUTANTS,
    *integers.MUTANTS,
]

OF_RECOVERY = recovery.MUTANTS
"""Faults of what outlives an end; they are measured apart."""

OF_DEVICES = [*devices.MUTANTS, *experts.MUTANTS]
"""Faults of models on devices; they are measured apart too."""
