"""Runs tests in a process of their own, in which a test that is skipped counts as failed."""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[1]


def outcomes(path: str, *options: str, **environment: str) -> dict[str, str]:
    """Why each test of a file or folder failed or was skipped, an empty text for those that passed."""
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
            command, cwd=ROOT, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        if not report.exists():
            raise RuntimeError(f"pytest exited with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
        tests = list(ElementTree.parse(report).iter("testcase"))
    return {f"{test.get('classname')}.{test.get('name')}": _why(test) for test in tests}


def _why(test: ElementTree.Element) -> str:
    faults = [child for child in test if child.tag in ("failure", "error", "skipped")]
    return "; ".join(f"{child.tag}: {child.get('message', '')}" for child in faults)[:500]
