"""A planted fault: plants it in a copy of the tree and runs the test that must fail. Contains no faults itself."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("shard", "router", "adapters", "launcher", "proto", "src", "tests", "pyproject.toml")
WRONG = ("AssertionError", "assert ", "Failed: DID NOT RAISE")
"""Beginnings of the message of a test that fails because a value is wrong, or because nothing was raised."""


@dataclass(frozen=True)
class Mutant:
    """`old`, which occurs once in `path`, becomes `new`; then `test` must fail because a value is wrong.

    `more`: further changes, (path, old, new), if the fault needs several.
    """

    name: str
    path: str
    old: str
    new: str
    test: str
    more: tuple[tuple[str, str, str], ...] = ()
    is_long: bool = False
    """Whether the test is marked `long`."""
    raises: str = ""
    """The exception that ends the test, for a fault that never gives a wrong value."""

    @property
    def changes(self) -> tuple[tuple[str, str, str], ...]:
        """(path, old, new) of each change."""
        return ((self.path, self.old, self.new), *self.more)

    def plant(self, tree: Path) -> None:
        for path, old, new in self.changes:
            target = tree / path
            text = target.read_text()
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: the text to change occurs {text.count(old)} times in {path}")
            target.write_text(text.replace(old, new))


def copy_tree(destination: Path) -> Path:
    """With compiled files: Python compiles a changed file again, because its time is another. The demo's models are
    linked: no fault is planted there.
    """
    destination.mkdir(parents=True, exist_ok=True)
    (destination / "demo").symlink_to(ROOT / "demo")
    for name in COPIED:
        source, target = ROOT / name, destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("*.egg-info"))
        else:
            shutil.copy(source, target)
    return destination


def results(tree: Path, tests: list[str], *, is_long: bool = False) -> list[str | None]:
    """Failure message of each test case in `tree`, or None; with `is_long`, of those marked `long` too. Raises
    RuntimeError if none ran or one had an error.
    """
    report = tree / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
    if is_long:
        command += ["-m", "not device"]  # replaces the selection of pyproject.toml
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=300, check=False)
    cases = ElementTree.parse(report).findall(".//testcase") if report.exists() else []
    if not cases or any(case.find("error") is not None for case in cases):
        raise RuntimeError(run.stdout + run.stderr)
    failures = [case.find("failure") for case in cases]
    return [None if failure is None else failure.get("message", "") for failure in failures]


def is_noticed(mutant: Mutant, tree: Path) -> str:
    """Plant a fault in a copy of the tree. Returns "" if its test fails because a value is wrong, else the reason."""
    mutant.plant(tree)
    reasons = [reason for reason in results(tree, [mutant.test], is_long=mutant.is_long) if reason is not None]
    if not reasons:
        return f"{mutant.test} passes although {mutant.name}"
    expected = (*WRONG, mutant.raises) if mutant.raises else WRONG
    broken = [reason for reason in reasons if not reason.startswith(expected)]
    return f"{mutant.name}: the code broke: {broken[0][:200]}" if broken else ""
