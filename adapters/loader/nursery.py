"""`python -m lorikeet.adapters.loader.nursery FD CONFIG.json`: has everything loaded that readers need, and forks them.

One thread, so that forking is sound: a reader costs milliseconds and few pages of its own. Speaks over the socket FD,
in messages of one JSON object; a message to fork brings the reader's socket along.
"""

import gc
import json
import os
import signal
import socket
import sys
import warnings
from typing import Any

from lorikeet.adapters.loader import process
from lorikeet.adapters.loader.config import LoaderConfig
from lorikeet.proto import logs

_MOST_STATUSES = 1024


def main() -> None:
    """Serve the parent until it closes."""
    process.end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        # the loader decides when its readers end
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    warnings.simplefilter("ignore")
    try:
        config = LoaderConfig.read(sys.argv[2])
        logs.configure(config.json_output, config.log_level, "loader")
        # after the parent's end is watched for: these take seconds
        import torch

        from lorikeet.adapters.loader import reader

        torch.set_num_threads(1)
        logs.adopt_libraries()
        work = reader.Work(config)
        logs.adopt_libraries()  # of those that the base's code needed
    except (ValueError, OSError, KeyError, ImportError) as error:
        _tell(control, {"failed": " ".join(str(error).split())[:500]})
        return
    gc.collect()
    gc.freeze()
    _tell(control, {"base": work.facts()})
    statuses: dict[int, int] = {}
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        if not message:
            return
        _reap(statuses)
        asked = json.loads(message)
        if "wait" in asked:
            _tell(control, {"status": _status(asked["wait"], statuses)})
            continue
        connection = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_reader(work, connection, bool(asked["fork"]["steps_back"]))
        connection.close()
        _tell(control, {"pid": pid})


def _become_reader(work: Any, connection: socket.socket, steps_back: bool) -> None:
    from lorikeet.adapters.loader import reader

    code = 1
    try:
        process.end_with_parent()
        if steps_back:
            process.step_back()
        reader.serve(work, connection)
        code = 0
    finally:
        os._exit(code)


def _reap(statuses: dict[int, int]) -> None:
    """Note how readers ended that nobody has asked for yet, or never will."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        statuses[pid] = os.waitstatus_to_exitcode(status)
        if len(statuses) > _MOST_STATUSES:
            del statuses[next(iter(statuses))]


def _status(pid: int, statuses: dict[int, int]) -> int:
    """Exit code of a reader, negative for the signal that ended it."""
    if pid in statuses:
        return statuses.pop(pid)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return 0


def _tell(control: socket.socket, answer: dict[str, Any]) -> None:
    control.send(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
