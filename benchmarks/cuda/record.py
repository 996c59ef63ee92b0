"""What is written about parts: one file of results for those that run in one process, in the words of proof.json.

A file has what is finished of a part from its first case on, so that what ends a process leaves what was seen. Knows
files, commits and the card's name; nothing of how anything is measured.
"""

import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import entries, history
from benchmarks.case import Bar, Case, Part
from benchmarks.cuda.plan import group_of
from benchmarks.cuda.setup import Setup

RESULTS = Path(__file__).parents[1] / "results"
SMOKE_RESULTS = Path(__file__).parents[1] / ".runs" / "cuda-smoke"
UNFINISHED = "unfinished"
Entry = dict[str, Any]


@dataclass(frozen=True)
class Commit:
    """Of the code that is measured."""

    name: str
    changed: Sequence[str] = ()
    """Files that differ from it."""

    @classmethod
    def of_tree(cls, told: str = "") -> "Commit":
        """`told`: by whoever runs this in a copy without a repository. Raises ValueError without either."""
        if told:
            return cls(told)
        try:
            return cls(history.head(), history.changed())
        except (subprocess.CalledProcessError, OSError):
            raise ValueError("this is no git repository: say which commit it is a copy of with --commit") from None

    def is_code_of(self, name: str) -> bool:
        """Whether it differs from a commit in nothing that could change a figure."""
        try:
            return history.same_code(name, self.name)
        except OSError:
            return name == self.name


def read(path: Path) -> list[Entry]:
    found: list[Entry] = json.loads(path.read_text()) if path.exists() else []
    return found


def is_finished(bars: Sequence[Bar], told: Sequence[Entry], commit: Commit, settings: dict[str, Any]) -> bool:
    """Whether the newest entry of every bar is whole, of this code, and of these settings."""
    newest = {each["bar"]: each for each in told}
    return not commit.changed and all(
        bar.name in newest and _stands(newest[bar.name], commit, settings) for bar in bars
    )


def _stands(told: Entry, commit: Commit, settings: dict[str, Any]) -> bool:
    is_whole = told["verdict"] in ("holds", "missed") and not told["changed"]
    return is_whole and told["settings"] == settings and commit.is_code_of(told["commit"])


@dataclass
class Recording:
    """A part under way."""

    part: Part
    bars: Sequence[Bar]
    folder: Path
    facts: dict[str, Any]
    """What all parts of the run share: commit, changed, machine, versions."""
    began: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    cases: list[Case] = field(default_factory=list)
    _start: float = field(default_factory=time.monotonic)

    @property
    def path(self) -> Path:
        return self.folder / f"{group_of(self.part)}.json"

    def write(self, is_whole: bool) -> list[Entry]:
        """Put what is known into the file, in place of what this run has put there before. Returns the entries."""
        facts = {
            "commit": self.facts["commit"],
            "changed": self.facts["changed"],
            "began": self.began,
            "seconds": round(time.monotonic() - self._start, 1),
            "settings": as_read(self.part.settings),
            "machine": self.facts["machine"],
            "versions": self.facts["versions"],
        }
        made = [entries.entry(bar, self.part, self.cases, facts) for bar in self.bars]
        if not is_whole:
            made = [{**each, "verdict": "failed", "reason": UNFINISHED} for each in made]
        kept = [each for each in read(self.path) if (each["part"], each["began"]) != (self.part.name, self.began)]
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps([*kept, *made], indent=1, ensure_ascii=False) + "\n")
        unfinished.replace(self.path)
        return made


def as_read(settings: Any) -> Any:
    """As they are after they were written and read: tuples are lists."""
    return json.loads(json.dumps(dict(settings)))


def machine(setup: Setup, bytes_per_s: float) -> dict[str, Any]:
    """What the figures depend on beside the code. `bytes_per_s`: of a copy, as measured just now."""
    told = {**entries.machine(), "copy_gb_per_s": round(bytes_per_s / 1e9, 1)}
    if not setup.is_cuda:
        return told
    import torch

    card = torch.cuda.get_device_properties(setup.device)
    return told | {
        "gpu": card.name,
        "gpu_memory_mib": card.total_memory >> 20,
        "multiprocessors": card.multi_processor_count,
        "driver": driver(),
        "cuda": torch.version.cuda,
    }


def versions() -> dict[str, str]:
    return {**entries.versions(), "triton": entries.version_of("triton")}


def driver() -> str:
    """The version of the card's driver, as its own tool has it."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "not told"


def folder_of(setup: Setup) -> Path:
    """Where a card's results are: `NVIDIA H200` has h200."""
    if not setup.is_cuda:
        return SMOKE_RESULTS
    import torch

    words = torch.cuda.get_device_name(setup.device).lower().split()
    return RESULTS / "-".join(word for word in words if word != "nvidia")
