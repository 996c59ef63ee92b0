"""Mirrors the tree. `tests/e2e` runs real processes, `tests/mutants` breaks rules on purpose."""
