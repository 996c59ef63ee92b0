"""How long `make test` takes in a fresh clone of HEAD: nothing installed, nothing cached except pip's own downloads.

python -m benchmarks.serving.fresh_clone
"""

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Case, Cases, raw_value
from benchmarks.load import servers

TIMEOUT_S = 1_800


def measure() -> Cases:
    """One case."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "-q", str(servers.REPOSITORY), str(clone)], check=True)
        environment = {**os.environ, "CI": "true"}
        start = time.monotonic()
        done = subprocess.run(
            ["make", "test"], cwd=clone, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        raw = {"seconds": round(time.monotonic() - start, 1), "summary": (done.stdout.strip().splitlines() or [""])[-1]}
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        last = "\n".join([*failed, done.stdout[-1500:]])
        error = "" if done.returncode == 0 else f"make test exited with {done.returncode}: {last}"
        yield Case("make test", raw, error)


if __name__ == "__main__":
    arguments.parser(__doc__).parse_args()
    sys.exit(arguments.print_cases(measure(), {"seconds": partial(raw_value, "seconds")}))
