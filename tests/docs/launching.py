"""`lorikeet-launcher` as the commands of the documentation find it: starts a small server in the background and returns
when it is ready. The port is the page's, and models of the hub are the demo family.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.docs.snippets import ENDING, standin
from tests.e2e.launched import alive

START_S = 240.0


def main(arguments: Sequence[str]) -> int:
    """Run one command line."""
    words = [standin(word) for word in arguments]
    command = [sys.executable, "-m", "lorikeet.launcher", *words]
    if set(words) & set(ENDING):
        return subprocess.run(command, check=False).returncode
    small = ["--hostname", "127.0.0.1", "--port", os.environ["SNIPPET_PORT"], "--cpu-memory", "256MiB"]
    small += [] if "--num-shard" in words else ["--threads", "1"]
    if "--shard-address" not in words:  # the shard is an earlier server of the page
        end_earlier()
    log = Path(os.environ["SNIPPET_LOG"])
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, *small], stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
        )
    with Path(os.environ["SNIPPET_PIDS"]).open("a") as pids:
        pids.write(f"{server.pid}\n")
    end = time.monotonic() + START_S
    while "is ready at" not in log.read_text():
        if server.poll() is not None or time.monotonic() > end:
            print(log.read_text()[-4000:])
            return 1
        time.sleep(0.1)
    return 0


def end_earlier() -> None:
    """The page's earlier server: a page shows alternatives, each on the same port."""
    pids = Path(os.environ["SNIPPET_PIDS"])
    for line in pids.read_text().split() if pids.exists() else ():
        try:
            os.killpg(int(line), signal.SIGKILL)
        except ProcessLookupError:
            continue
        while alive(int(line)):
            time.sleep(0.05)
    pids.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
