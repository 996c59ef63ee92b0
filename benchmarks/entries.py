"""What a file of results says about one bar: its figure and verdict with every case, and the machine that gave them.

Knows no measurement, no file and no commit.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.case import Bar, Case, Part, verdict

VERSIONS = ("torch", "transformers", "tokenizers", "grpcio", "fastapi", "uvicorn", "uvloop", "numpy")


def entry(bar: Bar, part: Part, cases: Sequence[Case], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a bar. `facts`: what all bars of the run share, such as commit and machine."""
    failed = any(case.error for case in cases) or len(cases) != bar.num_cases
    void = "" if failed else part.void([case.raw for case in cases])
    state, measured = verdict(bar, cases, void)
    return {
        "bar": bar.name,
        "part": part.name,
        "wanted": bar.wanted,
        "at_least": bar.at_least,
        "unit": bar.unit,
        "over": bar.over.value,
        "measured": None if measured is None else round(measured.median, 6),
        "spread": None if measured is None else [round(measured.low, 6), round(measured.high, 6)],
        "verdict": state,
        "reason": void or next((case.error for case in cases if case.error), ""),
        "num_cases": len(cases),
        "cases": [_told(bar, case) for case in cases],
        **facts,
    }


def _told(bar: Bar, case: Case) -> dict[str, Any]:
    """A case with its own verdict."""
    value = None if case.error else bar.value(case.raw)
    return {
        "case": case.name,
        "value": value,
        "reaches": value is not None and bar.reaches(value, value),
        "error": case.error,
        "raw": dict(case.raw),
    }


def machine() -> dict[str, Any]:
    """What the figures depend on beside the code."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict(part.partition(":")[::2] for part in lines)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    flags = [flag for flag in named.get("flags", "").split() if flag.startswith(("avx512_bf16", "amx", "avx512f"))]
    memory = int(Path("/proc/meminfo").read_text().split()[1]) // 1024
    cores = len(os.sched_getaffinity(0))
    known = (
        f"{named.get('model name', platform.processor())} family {named.get('cpu family')} model {named.get('model')}"
    )
    return {"processor": known, "cores": cores, "flags": flags, "memory_mib": memory, "kernel": platform.release()}


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version_of(name) for name in VERSIONS}}


def version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
