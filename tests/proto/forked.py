"""A process of `test_preload`: `python -m tests.proto.forked WORK …`."""

import gc
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path


def report() -> None:
    """Write what it was started with to a descriptor."""
    values = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "pid": os.getpid(),
        "parent": os.getppid(),
        "group": os.getpgid(0),
        "collects": gc.isenabled() and gc.get_freeze_count() > 0,
        "has_imported": "tests.proto.preloaded" in sys.modules,
        "command": Path("/proc/self/cmdline").read_text().split("\0"),
    }
    os.write(int(sys.argv[2]), json.dumps(values).encode())
    sys.exit(7)


def packages() -> None:
    """Exit with 0 if the preloaded modules did not find a package that this process finds."""
    from importlib.util import find_spec

    from tests.proto.preloaded import HAS_SCIPY

    sys.exit(HAS_SCIPY or find_spec("scipy") is None)


def orphan() -> None:
    """Leave a child that ends a moment later."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.1)"])


WORK = {
    "filters": lambda: os.write(int(sys.argv[2]), repr(warnings.filters).encode()),
    "report": report,
    "packages": packages,
    "orphan": orphan,
    "print": lambda: print("printed"),
    "wait": lambda: time.sleep(600),
    "touch": lambda: Path(sys.argv[2]).touch(),
}

if __name__ == "__main__":
    WORK[sys.argv[1]]()
