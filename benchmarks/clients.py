"""Clients that others wrote, unchanged, against our router: their tests, one case each, with nothing skipped.

Installs what they pin into an environment of its own where it is missing. Knows pytest's report, and no client.
"""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.case import Case, Cases, Raw

TESTS = "tests/router/api/routes/test_lorax_client.py"
NUM_TESTS = 4
SETTINGS: dict[str, Any] = {"tests": TESTS, "client": "lorax-client"}


def measure(finished: frozenset[str] = frozenset()) -> Cases:
    """One case per test; one that was skipped has failed."""
    from tests.router.api import lorax_client

    lorax_client.install()
    for case in outcomes(TESTS, LORIKEET_REQUIRE_LORAX_CLIENT="1"):
        if case.name not in finished:
            yield case


def outcomes(path: str, *options: str, **environment: str) -> Iterator[Case]:
    """What pytest says of each test in a file or folder."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            *options,
            path,
        ]
        done = subprocess.run(
            command,
            cwd=servers.REPOSITORY,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.exists():
            raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
        tests = list(ElementTree.parse(report).iter("testcase"))
    for test in tests:
        told = [child for child in test if child.tag in ("failure", "error", "skipped")]
        why = "; ".join(f"{child.tag}: {child.get('message', '')}" for child in told)[:500]
        kind = test.get("classname", "").rpartition(".")[2]
        name = test.get("name", "")
        yield Case(
            f"{kind}.{name}" if kind[:1].isupper() else name,
            {"failed": int(bool(told)), "why": why, "seconds": test.get("time")},
        )


def num_failed(raw: Raw) -> float:
    return float(raw["failed"])
