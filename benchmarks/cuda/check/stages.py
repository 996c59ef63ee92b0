"""The stages, most important first, and how many seconds each may take on a card."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from benchmarks.cuda.check.rows import Row, Rows
from benchmarks.cuda.setup import SMOKE, Setup, at_hand

__all__ = ["BOTH", "STAGES", "USUAL", "Row", "Stage", "run"]


@dataclass(frozen=True)
class Stage:
    """A function of a module in this folder, and its limit."""

    module: str
    function: str
    limit_s: float
    is_compiled: bool = True
    """Whether it waits for kernels to be compiled."""


STAGES = {
    "warm": Stage("warm", "compile_kernels", 60),
    "ceilings": Stage("ceilings", "measure", 45, is_compiled=False),
    "kernels": Stage("kernels", "check", 110),
    "sampling": Stage("sampling", "check", 40),
    "embedded": Stage("embedded", "check", 80),
    "large": Stage("large", "check", 110),
    "adapters": Stage("adapters", "check", 100),
    "bits": Stage("large", "check_bits", 90),
    "peer": Stage("peer", "check", 60),
    "server": Stage("server", "check", 80),
    "cases": Stage("cases", "check", 150),
    "prompts": Stage("large", "check_prompts", 60),
    "small": Stage("large", "check_small", 60),
    "served": Stage("server", "check_served", 100),
    "disk": Stage("adapters", "check_disk", 60),
    "speculation": Stage("speculation", "check", 300),
    "start": Stage("start", "check", 120),
    "limits": Stage("kernels", "check_limits", 60),
}
USUAL = ("warm", "ceilings", "kernels", "sampling", "embedded", "large", "adapters", "bits", "peer", "server", "cases")
BOTH = ("ceilings", "sampling", "large", "adapters", "bits")


def run(name: str, rows: Rows, is_smoke: bool, is_brief: bool) -> int:
    """Run a stage in this process. Returns its exit code."""
    stage = STAGES[name]
    function: Callable[[Rows, Setup, bool], None] = getattr(
        import_module(f"benchmarks.cuda.check.{stage.module}"), stage.function
    )
    function(rows, SMOKE if is_smoke else at_hand(), is_brief)
    return 0
