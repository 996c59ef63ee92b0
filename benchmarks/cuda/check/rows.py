"""Rows of the table: a check writes its row before the next begins, so that a crash loses one at most."""

import json
import lzma
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FILE, CURRENT, LOGS = "rows.jsonl", "current.txt", "logs"
"""In the folder of results: the rows, the check that runs, and what other processes print."""
BROKEN = 75
"""Exit code after an error that the device does not recover from."""
BREAK, HANG = "GPU_CHECK_BREAK", "GPU_CHECK_HANG"
"""Environment variables with the name of a check that shall crash, or never end: for tests."""
MOST_CHARACTERS = 9000
LEAST_WIDTH, ROW_WIDTH, FAILED_WIDTH = 60, 170, 240
HIDDEN = ("s", "off", "same_bits", "differ", "capture_s")
"""Values that say nothing new in the line of a row that is right."""
LOWER_IS_BETTER = ("us", "ms", "ms_each", "gap_us", "over_idle", "lengthening", "later_ms")
HIGHER_IS_BETTER = ("tok_s", "tflops", "copy_gbs", "share_of_copy", "gbs")
"""Values that are compared with those of another run, the first of them alone."""


@dataclass
class Rows:
    """What one stage of a run writes."""

    out: Path
    stage: str
    done: frozenset[str] = frozenset()
    """Checks of this stage that are not repeated."""

    def put(self, name: str, **values: Any) -> None:
        """Write a row. `ok`: whether it is right; rows without it are right."""
        with (self.out / FILE).open("a") as file:
            file.write(json.dumps({"stage": self.stage, "name": name, **values}) + "\n")
        print(f"[{self.stage}] {name}: {summary(values)}", flush=True)

    def check(self, name: str, work: Callable[[], Row], is_needed: bool = False) -> bool:
        """Run a check and write its row, unless it is done. `work` returns the values. `is_needed`: later checks need
        what it makes, so that it runs again. Returns whether it is right. Ends the process if the device is broken.
        """
        if name in self.done and not is_needed:
            return False
        (self.out / CURRENT).write_text(name)
        if os.environ.get(BREAK) == name:
            os._exit(BROKEN)
        while os.environ.get(HANG) == name:
            time.sleep(60)
        start = time.monotonic()
        try:
            values = {"ok": True, **work()}
        except Exception as error:  # what is tested may raise anything
            first = (str(error).strip().splitlines() or [""])[0]
            values = {"ok": False, "error": f"{type(error).__name__}: {first}"[:300]}
        if name not in self.done or not values["ok"]:
            self.put(name, **values, s=round(time.monotonic() - start, 2))
        if not values["ok"] and is_broken():
            os._exit(BROKEN)
        return bool(values["ok"])

    def log(self, name: str) -> Path:
        """A file for what another process prints."""
        folder = self.out / LOGS
        folder.mkdir(exist_ok=True)
        return folder / f"{self.stage}-{name}.txt"


def is_broken() -> bool:
    """Whether the device computes nothing any more."""
    import torch

    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except RuntimeError:
        return True
    return False


def read(path: Path) -> list[Row]:
    """The rows in a file, compressed if its name ends in .xz, or in the file of a folder of results; else none."""
    path = path / FILE if path.is_dir() else path
    if not path.exists():
        return []
    text = lzma.decompress(path.read_bytes()).decode() if path.suffix == ".xz" else path.read_text()
    return [json.loads(line) for line in text.splitlines()]


def ceilings(out: Path) -> Row:
    """What the stage `ceilings` has measured, in its units; nothing if it has not run."""
    return next((row for row in reversed(read(out)) if row["name"] == "card" and row.get("copy_gbs")), {})


def summary(row: Row, hidden: Sequence[str] = ()) -> str:
    """A row's values in one line; the hidden ones are left out."""
    shown = (item for item in row.items() if item[0] not in ("stage", "name", "ok", "error", *hidden))
    text = " ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in shown)
    return f"{row['error']} {text}" if row.get("error") else text


def ratio(row: Row, other: Row) -> str:
    """How a row's first comparable value is to another run's: `us 0.5x`, below 1 faster; or nothing."""
    for key in (*LOWER_IS_BETTER, *HIGHER_IS_BETTER):
        if all(isinstance(values.get(key), (int, float)) and values[key] > 0 for values in (row, other)):
            return f" | {key} {row[key] / other[key]:.2f}x"
    return " | no longer right" if other.get("ok", True) and not row.get("ok", True) else ""


def table(head: str, rows: Sequence[Row], earlier: Sequence[Row] = ()) -> str:
    """At most MOST_CHARACTERS: the head, then a line per row, those that are not right first. With rows of another run
    each line has its ratio to the row of the same name there. The more rows there are, the shorter are their lines.
    """
    others = {(row["stage"], row["name"]): row for row in earlier}
    failed = [row for row in rows if not row.get("ok", True)]
    right = [row for row in rows if row.get("ok", True)]
    lines = [head, f"{len(rows)} rows, {len(failed)} not ok"]
    lines += [f"NOT OK {row['stage']} | {row['name']} | {summary(row)}"[:FAILED_WIDTH] for row in failed]
    room = MOST_CHARACTERS - sum(len(line) + 1 for line in lines)
    width = min(ROW_WIDTH, max(LEAST_WIDTH, room // max(1, len(right)) - 2))
    for stage in dict.fromkeys(row["stage"] for row in right):
        lines.append(f"{stage}:")
        for row in right:
            if row["stage"] == stage:
                compared = ratio(row, others.get((stage, row["name"]), {}))
                lines.append(f"  {row['name']}: {summary(row, HIDDEN)}"[: width - len(compared)].rstrip() + compared)
    return _shortened(lines)


def _shortened(lines: Sequence[str]) -> str:
    """The first lines that fit, and how many are left out."""
    room = MOST_CHARACTERS - len(f"and 0000 more rows in {FILE}\n")
    kept: list[str] = []
    for line in lines:
        room -= len(line) + 1
        if room < 0:
            return "\n".join([*kept, f"and {len(lines) - len(kept)} more rows in {FILE}"])
        kept.append(line)
    return "\n".join(kept)
