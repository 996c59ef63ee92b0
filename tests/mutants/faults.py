"""All planted faults."""

from tests.mutants import (
    devices,
    dialects,
    embeddings,
    experts,
    grammars,
    integers,
    kernels,
    page,
    real,
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
    *kernels.MUTANTS,
]

OF_RECOVERY = recovery.MUTANTS
"""Faults of recovery and access. `make test` samples them separately."""

OF_DEVICES = [*devices.MUTANTS, *experts.MUTANTS]
"""Faults of models on devices. `make test` samples them separately too."""

OF_PAGE = page.MUTANTS
"""Faults of the page. Their tests need a browser, so `make test-long` runs them."""

OF_REAL_MODELS = real.MUTANTS
"""Faults whose tests need the models of `make test-real`; `make test-long` runs them where the models are."""
