"""A server's processes write their logs to one pipe: what is not one write may have another's line inside it."""

import os
import socket
import subprocess
import sys

import pytest

PROGRAM = """
import logging, threading
{configure}
{ours}
logging.getLogger("some.library").warning("theirs")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise RuntimeError("nobody caught this")
"""
STRUCTLOG = 'import structlog; structlog.get_logger().info("ours")'
PROCESSES = {
    "shard": ("from lorikeet.shard.system import logs; logs.configure({json}, 'info')", STRUCTLOG),
    "loader": ("from lorikeet.adapters.loader import logs; logs.configure({json}, 'info')", STRUCTLOG),
    "router": ("from lorikeet.router.logging import configure_logging; configure_logging('info', {json})", STRUCTLOG),
    "launcher": (
        "import sys; from lorikeet.launcher import logs; log = logs.start({json}, 'info', sys.stderr)",
        'log.info("ours")',
    ),
}


def writes(program: str) -> list[str]:
    """What a process writes to its standard error, write by write."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # as the launcher has it
    with ours:
        with its:
            process = subprocess.Popen([sys.executable, "-c", program], stderr=its, env=environment)
        found = list(iter(lambda: ours.recv(1 << 20).decode(), ""))
    assert process.wait(60) == 1
    return found


@pytest.mark.parametrize("name", PROCESSES)
def test_a_line_of_json_is_one_write(name: str) -> None:
    configure, ours = PROCESSES[name]
    found = writes(PROGRAM.format(configure=configure.format(json=True), ours=ours))
    assert len(found) == 4
    assert all(line.startswith("{") and line.endswith("}\n") and line.count("\n") == 1 for line in found), found
