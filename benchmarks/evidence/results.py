"""Results of figures: the latest of each as a small JSON file, and every run, with its raw cases, in an archive that
only grows.

A void run says nothing and leaves the latest result as it is; it is in the archive alone.
"""

import json
import lzma
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.evidence.figure import Case, Figure, Raw, Suite, percentile, status

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"
CODE = ("--", ".", ":!benchmarks/results")
"""Arguments of git: all files but results."""
VERSIONS = ("torch", "transformers", "tokenizers", "grpcio", "fastapi", "uvicorn", "uvloop", "numpy", "triton")
Result = dict[str, Any]
MAX_SAMPLES = 1000
"""Longer lists of a case are archived as these percentiles."""
PERCENTS = (50, 90, 99, 100)


def slug(name: str) -> str:
    """The name of a figure's file."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("χ²", "chi2")).strip("-")


def facts(commit: str = "", extra: Mapping[str, Any] | None = None) -> Result:
    """What all results of a run share. `commit`: of an unchanged copy that is no repository. Results are no change: no
    figure depends on them.
    """
    return {
        "commit": commit or git("rev-parse", "HEAD").strip(),
        "changed": [] if commit else [line[3:] for line in git("status", "--porcelain", *CODE).splitlines()],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {**machine(), **(extra or {})},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in VERSIONS}},
    }


def git(*arguments: str) -> str:
    """What git prints. Raises ValueError if there is no repository."""
    try:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (subprocess.CalledProcessError, OSError):
        raise ValueError("this is no git repository: name the commit it is a copy of with --commit") from None


def printed(*command: str) -> str:
    """The first word that a program prints, `unknown` if it fails."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = [flag for flag in named.get("flags", "").split() if flag.startswith(("avx512_bf16", "amx", "avx512f"))]
    name = (
        f"{named.get('model name', platform.processor())} family {named.get('cpu family')} model {named.get('model')}"
    )
    return {
        "processor": name,
        "cores": len(os.sched_getaffinity(0)),
        "flags": flags,
        "memory_mib": int(Path("/proc/meminfo").read_text().split()[1]) // 1024,
        "kernel": platform.release(),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def result_of(figure: Figure, suite: Suite, cases: Sequence[Case], shared: Mapping[str, Any], seconds: float) -> Result:
    """The result of one figure, without raw cases."""
    state, reason, estimate = status(figure, suite, cases)
    return {
        "figure": figure.name,
        "suite": suite.name,
        "unit": figure.unit,
        "target": figure.target,
        "at_least": figure.at_least,
        "over": figure.over.value,
        "status": state,
        "reason": reason,
        "median": None if estimate is None else round(estimate.median, 6),
        "interval": None if estimate is None else [round(estimate.low, 6), round(estimate.high, 6)],
        "rounds": len(cases),
        "seconds": round(seconds, 1),
        "model": suite.model,
        "dtype": suite.dtype,
        "peer": suite.peer,
        "settings": suite.settings,
        **shared,
    }


def write(results: Sequence[Result], cases: Sequence[Case], folder: Path = RESULTS) -> None:
    """Make these the latest results, and append them to the archive with the raw cases of their suite."""
    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        if result["status"] != "void":
            path = folder / f"{slug(result['figure'])}.json"
            unfinished = path.with_suffix(".part")
            unfinished.write_text(_lines(result))
            unfinished.replace(path)
    summaries = [asdict(replace(case, raw=summarized(case.raw))) for case in cases]
    archive([*results, {"suite": results[0]["suite"], "cases": summaries}], folder)


def _lines(result: Result) -> str:
    """JSON with a line per field."""
    fields = (f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in result.items())
    return "{\n" + ",\n".join(fields) + "\n}\n"


def summarized(raw: Raw) -> Result:
    """Raw values with percentiles in the place of long lists of samples."""
    summary: Result = {}
    for name, value in raw.items():
        if isinstance(value, Mapping):
            summary[name] = summarized(value)
        elif isinstance(value, list) and len(value) > MAX_SAMPLES and all(isinstance(x, int | float) for x in value):
            summary[name] = {"count": len(value)} | {f"p{percent}": percentile(value, percent) for percent in PERCENTS}
        else:
            summary[name] = value
    return summary


def archive(rows: Iterable[Mapping[str, Any]], folder: Path = RESULTS) -> None:
    """Append rows to this year's archive. It stays one xz stream: rows resemble earlier ones."""
    path = folder / "archive" / f"{datetime.now(UTC).year}.jsonl.xz"
    path.parent.mkdir(parents=True, exist_ok=True)
    known = lzma.decompress(path.read_bytes()) if path.exists() else b""
    added = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(lzma.compress(known + added, preset=9 | lzma.PRESET_EXTREME))
    unfinished.replace(path)


def archived(folder: Path = RESULTS) -> Iterator[Result]:
    """Every row of the archive, the oldest first."""
    for path in sorted((folder / "archive").glob("*.jsonl.xz")):
        with lzma.open(path, "rt", encoding="utf-8") as file:
            yield from (json.loads(line) for line in file)


def latest(folder: Path = RESULTS) -> dict[str, Result]:
    """The latest result of each figure, by name."""
    stored = (json.loads(path.read_text()) for path in sorted(folder.glob("*.json")))
    return {result["figure"]: result for result in stored}
