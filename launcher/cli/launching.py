"""`launch`: a context manager that starts a server from Python and ends it after the block."""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from lorikeet.launcher.cli.client import Client
from lorikeet.launcher.config.flag import FlagKind
from lorikeet.launcher.config.flags import FLAGS, FORMER_NAMES
from lorikeet.launcher.processes.supervisor import Address
from lorikeet.proto.children import Child
from lorikeet.proto.process import environment_of_children, free_port

_POLL_S = 0.05
_GRACE_S = 20.0
_SHOWN_LINES = 40
_DRAIN_S = 5.0


class LaunchError(Exception):
    """The server did not become ready; the message ends with its last log lines."""


@contextmanager
def launch(
    model_id: str | None = None,
    draft_model_id: str | None = None,
    *,
    start_timeout_s: float = 1800.0,
    environment: Mapping[str, str] | None = None,
    **flags: Any,
) -> Iterator[Client]:
    """A server of `model_id` (by default the built-in demo model) on a free loopback port, and a client of it.

    `flags` are lorikeet-launcher's with underscores: `launch(model, speculative_tokens=3, dtype="float32")`. A list
    repeats its flag; None omits it. `environment` replaces that of this process. The server ends with the block, and
    with the thread that entered it. Raises LaunchError, TypeError for an unknown flag, and ValueError for a switch that
    is neither true nor false.
    """
    values: dict[str, Any] = {"hostname": "127.0.0.1", "port": free_port(), "drain-timeout-s": _DRAIN_S}
    values |= {"model-id": model_id, "draft-model-id": draft_model_id}
    values |= {name.replace("_", "-"): value for name, value in flags.items()}
    scheme = "http" if values.get("ssl-certfile") is None else "https"
    address = Address(values["hostname"], int(values["port"]), scheme)
    words = [word for name, value in values.items() for word in flag_words(name, value)]
    base = os.environ if environment is None else environment
    with tempfile.TemporaryFile() as log:
        server = Child("the server", "lorikeet.launcher", words, environment_of_children(base), output=log)
        try:
            _wait_until_ready(server, address, start_timeout_s, log)
            yield Client(address.url)
        finally:
            server.terminate()
            server.wait(float(values["drain-timeout-s"]) + _GRACE_S)
            server.kill()


def flag_words(name: str, value: Any) -> list[str]:
    """A flag and its value as words of a command line. Raises TypeError for an unknown flag."""
    flag = FLAGS.get(FORMER_NAMES.get(name, name))
    if flag is None:
        raise TypeError(f"lorikeet-launcher has no flag --{name}")
    if value is None:
        return []
    if flag.kind is FlagKind.SWITCH:
        return [f"--{name}"] if flag.value(str(value)) else []
    values = value if flag.repeated and isinstance(value, list | tuple) else [value]
    return [f"--{name}={str(one).lower() if isinstance(one, bool) else one}" for one in values]


def _wait_until_ready(server: Child, address: Address, seconds: float, log: IO[bytes]) -> None:
    end = time.monotonic() + seconds
    while server.exit_code is None and time.monotonic() < end:
        if address.is_ready():
            return
        time.sleep(_POLL_S)
    what = f"{server.name} was not ready within {seconds:g} s" if server.exit_code is None else server.ending
    raise LaunchError(f"{what}\n{_last_lines(log)}")


def _last_lines(log: IO[bytes]) -> str:
    """Read without moving the file position, at which the server writes."""
    text = os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(errors="replace")
    return "\n".join(text.splitlines()[-_SHOWN_LINES:])
