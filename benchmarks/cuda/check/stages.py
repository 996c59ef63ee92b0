"""The stages, most important first, and how many seconds each may take on a card."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from benchmarks.cuda.check.rows import Row, Rows
from benchmarks.cuda.setup import SMOKE, Setup, at_hand

__all__ = ["BOTH", "STAGES", "USUAL", "Row", "Stage", "run"]


@dataclass(frozen=True)
class Stage:
    """A function of a module in benchmarks/cuda, and its limit."""

    module: str
    function: str
    limit_s: float
    is_compiled: bool = True
    """Whether it waits for kernels to be compiled."""


STAGES = {
    "warm": Stage("check.warm", "compile_kernels", 60),
    "ceilings": Stage("check.ceilings", "measure", 45, is_compiled=False),
    "kernels": Stage("check.kernels", "check", 110),
    "sampling": Stage("check.sampling", "check", 40),
    "embedded": Stage("check.embedded", "check", 80),
    "large": Stage("check.large", "check", 110),
    "adapters": Stage("check.adapters", "check", 100),
    "bits": Stage("check.large", "check_bits", 90),
    "peer": Stage("check.peer", "check", 60),
    "server": Stage("check.server", "check", 80),
    "cases": Stage("check.cases", "check", 150),
    "prompts": Stage("check.large", "check_prompts", 60),
    "small": Stage("check.large", "check_small", 60),
    "served": Stage("check.server", "check_served", 100),
    "disk": Stage("check.adapters", "check_disk", 60),
    "speculation": Stage("check.speculation", "check", 300),
    "start": Stage("check.start", "check", 120),
    "limits": Stage("attention", "check_limits", 60),
}
USUAL = ("warm", "ceilings", "kernels", "sampling", "embedded", "large", "adapters", "bits", "peer", "server", "cases")
BOTH = ("ceilings", "sampling", "large", "adapters", "bits")


def run(name: str, rows: Rows, is_smoke: bool, is_brief: bool) -> int:
    """Run a stage in this process. Returns its exit code."""
    stage = STAGES[name]
    function: Callable[[Rows, Setup, bool], None] = getattr(
        import_module(f"benchmarks.cuda.{stage.module}"), stage.function
    )
    function(rows, SMOKE if is_smoke else at_hand(), is_brief)
    return 0
