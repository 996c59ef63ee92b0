"""All faults that are planted on purpose."""

from tests.mutants import sampling, scheduling, speculation

FAULTS = [*sampling.MUTANTS, *scheduling.MUTANTS, *speculation.MUTANTS]
