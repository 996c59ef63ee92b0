"""The process that imports once and forks others: what it forks, and what it does not hold."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lorikeet.proto.preload import is_possible
from tests.launcher.processes.test_supervisor import ENVIRONMENT, ROOT, gone

pytestmark = pytest.mark.skipif(not is_possible(), reason="needs Linux")

LAUNCHER = """
import json, os, sys, tempfile, time
from pathlib import Path
from lorikeet.proto.children import Child
from lorikeet.proto.preload import Preload, reap_adopted

folder = Path(sys.argv[1])
preload = Preload(folder, ["tests.proto.preloaded"], os.environ)

def started(*arguments, environment=os.environ, **options):
    return Child("the child", "tests.proto.forked", list(arguments), environment, preload=preload, **options)

def say(*values):
    print(json.dumps(values), flush=True)

def ended(child):
    while child.exit_code is None:
        time.sleep(0.01)
    return child.ending
"""


def launched(folder: Path, program: str, **environment: str) -> list[Any]:
    """What a launcher's program says, line by line."""
    command = [sys.executable, "-c", LAUNCHER + program, str(folder)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**ENVIRONMENT, **environment}, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def test_a_forked_module_runs_as_one_that_python_starts(tmp_path: Path) -> None:
    """Its arguments, environment, group, parent, descriptors and exit code; what it imports is there."""
    reported, own, code = launched(
        tmp_path,
        """
reading, writing = os.pipe()
child = started("report", str(writing), environment={"ONE": "1"}, inherits=[writing])
while not child.pid:
    child.exit_code
say(json.loads(os.read(reading, 65536)))
say(child.pid, os.getpid())
say(ended(child), child.exit_code, preload._process.pid)
""",
    )
    report = reported[0]
    assert report["arguments"] == ["report", report["arguments"][1]] and report["environment"] == {"ONE": "1"}
    assert [report["pid"], report["parent"]] == own and report["group"] == report["pid"]
    assert report["has_imported"] and report["collects"]
    assert report["command"][:3] == ["python", "-m", "tests.proto.forked"]
    assert code[:2] == ["the child ended with exit code 7", 7]


def test_what_it_prints_goes_to_a_file(tmp_path: Path) -> None:
    launched(
        tmp_path,
        """
with open(folder / "output", "wb") as output:
    child = started("print", output=output)
say(ended(child))
""",
    )
    assert (tmp_path / "output").read_text() == "printed\n"


def test_its_end_by_a_signal_is_reported(tmp_path: Path) -> None:
    (message,) = launched(
        tmp_path,
        """
child = started("wait")
while not child.pid:
    child.exit_code
child.terminate()
say(ended(child))
""",
    )
    assert message == ["the child was ended by SIGTERM"]


def test_one_that_is_ended_before_it_was_forked_never_runs(tmp_path: Path) -> None:
    (message,) = launched(
        tmp_path,
        """
child = started("touch", str(folder / "has run"))
child.kill()
say(ended(child))
other = started("print")
ended(other)
""",
    )
    assert message == ["the child was ended by SIGKILL"] and not (tmp_path / "has run").exists()


def test_it_is_started_again_after_its_end(tmp_path: Path) -> None:
    first, others, second = launched(
        tmp_path,
        """
child = started("wait")
while not child.pid:
    child.exit_code
say(child.exit_code)
preload._process.kill()
preload._process.wait()
preload.check()
say(child.exit_code)  # what it has forked goes on
child.kill()
say(ended(started("print")))
""",
    )
    assert first == [None] and others == [None] and second == ["the child ended with exit code 0"]


def test_it_is_started_once_another_process_waits_for_it(tmp_path: Path) -> None:
    """The loader of a router whose shards are elsewhere: the launcher has forked nothing."""
    before, after = launched(
        tmp_path,
        """
from lorikeet.proto.preload import ForkedProcess

preload.check()
say(preload.pid)
waits = ForkedProcess(preload.address, "tests.proto.forked", ["print"], os.environ)
until = time.monotonic() + 60
while waits.poll() is None and time.monotonic() < until:
    preload.check()
    time.sleep(0.01)
say(waits.poll(), preload.pid > 0)
""",
    )
    assert before == [0] and after == [0, True]


def test_one_that_cannot_import_is_not_started_for_ever(tmp_path: Path) -> None:
    first, second = launched(
        tmp_path,
        """
preload._modules = ["tests.proto.no_such_module"]
child = started("print")
say(ended(child), child.exit_code)
say(ended(started("print")))
""",
    )
    problem = "the process that forks it ended 5 times in a row with exit code 1"
    assert first == [f"the child ended with exit code 1 ({problem})", 1]
    assert second == [f"the child ended with exit code 1 ({problem})"]


def test_a_forked_process_ends_with_the_launcher(tmp_path: Path) -> None:
    ((pid, preload),) = launched(
        tmp_path,
        """
child = started("wait")
while not child.pid:
    child.exit_code
say(child.pid, preload._process.pid)
os._exit(0)
""",
    )
    until = time.monotonic() + 30
    while not (gone(pid) and gone(preload)) and time.monotonic() < until:
        time.sleep(0.01)
    assert gone(pid) and gone(preload)


def test_the_launcher_forgets_what_it_adopts(tmp_path: Path) -> None:
    (left,) = launched(
        tmp_path,
        """
child = started("orphan")
ended(child)
time.sleep(0.2)
reap_adopted([child.pid, preload._process.pid])

def is_zombie(pid):
    try:
        return f") Z {os.getpid()} " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # another program's
        return False

say([name for name in os.listdir("/proc") if name.isdigit() and is_zombie(name)])
""",
    )
    assert left == [[]]


def test_it_holds_nothing_of_the_operators_environment(tmp_path: Path) -> None:
    """Neither in its environment nor anywhere in its memory, after it has forked a process that has it."""
    (held,) = launched(
        tmp_path,
        """
child = started("print", environment=dict(os.environ))
ended(child)
pid, secret, held = preload._process.pid, os.environ["HF_TOKEN"].encode(), []
with open(f"/proc/{pid}/mem", "rb") as memory:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        place, rights = line.split()[:2]
        start, end = (int(number, 16) for number in place.split("-"))
        if not rights.startswith("rw"):
            continue
        memory.seek(start)
        if secret in memory.read(end - start):
            held.append(line)
say(held, secret.decode() in Path(f"/proc/{pid}/environ").read_text())
""",
        HF_TOKEN="hf_secret_of_the_operator",
    )
    assert held == [[], False]


def test_it_reads_what_libraries_read_while_they_are_imported(tmp_path: Path) -> None:
    """The address of the hub is such a variable, and the processes that download adapters are forked."""
    (held,) = launched(
        tmp_path,
        """
ended(started("print"))
say(Path(f"/proc/{preload._process.pid}/environ").read_text().split("\\0"))
""",
        HF_ENDPOINT="http://127.0.0.1:1",
        HF_TOKEN="hf_secret_of_the_operator",
    )
    assert "HF_ENDPOINT=http://127.0.0.1:1" in held[0] and not any("secret" in variable for variable in held[0])


def test_packages_that_are_hidden_while_it_imports_are_there_afterwards(tmp_path: Path) -> None:
    (code,) = launched(
        tmp_path,
        """
preload._without = ["scipy"]
child = started("packages")
ended(child)
say(child.exit_code)
""",
    )
    assert code == [0]


def test_a_client_that_sends_nothing_delays_no_other(tmp_path: Path) -> None:
    (ending,) = launched(
        tmp_path,
        """
import socket
silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
silent.connect(preload.address)
say(ended(started("print")))
""",
    )
    assert ending == ["the child ended with exit code 0"]


def test_several_threads_see_the_same_end(tmp_path: Path) -> None:
    """One waits, as the loader does for what reads adapters, and another ends the process."""
    (codes,) = launched(
        tmp_path,
        """
import threading
child, codes = started("wait"), []
while not child.pid:
    child.exit_code
process = child._process
threads = [threading.Thread(target=lambda: codes.append(process.wait(60))) for _ in range(8)]
for thread in threads:
    thread.start()
time.sleep(0.2)
process.kill()
codes.append(process.wait(60))
for thread in threads:
    thread.join()
say(*codes)
""",
    )
    assert codes == [-9] * 9


def test_it_warns_as_python_does(tmp_path: Path) -> None:
    """What is imported warns of nothing; a forked process has the filters of Python."""
    reported, own = launched(
        tmp_path,
        """
reading, writing = os.pipe()
child = started("filters", str(writing), inherits=[writing])
while not child.pid:
    child.exit_code
say(os.read(reading, 65536).decode())
import warnings
say(repr(warnings.filters))
""",
    )
    assert reported == own


def test_its_end_is_seen_though_the_launcher_adopts(tmp_path: Path) -> None:
    (code,) = launched(
        tmp_path,
        """
ended(started("print"))
preload._process.kill()
time.sleep(0.2)
reap_adopted([preload.pid])
say(preload._process.wait())
""",
    )
    assert code == [-9]
