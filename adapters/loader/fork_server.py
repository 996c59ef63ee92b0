"""`python -m lorikeet.adapters.loader.fork_server FD CONFIG.json`: loads what workers need once, then forks them.

It has one thread, so that forking is safe: a worker costs milliseconds and few pages of its own. The socket FD carries
messages of one JSON object; a message to fork passes the worker's socket with it.
"""

import contextlib
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

_MAX_STATUSES = 1024


def main() -> None:
    """Serve the parent until it closes the socket."""
    process.end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        # the loader decides when its workers end
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    warnings.simplefilter("ignore")
    try:
        config = LoaderConfig.read(sys.argv[2])
        logs.configure(config.json_output, config.log_level, "loader")
        # after the parent's end is watched for: these take seconds
        import torch

        from lorikeet.adapters.loader import worker

        torch.set_num_threads(1)
        logs.adopt_libraries()
        context = worker.WorkerContext(config)
        logs.adopt_libraries()  # for the libraries that the base's code imported
    except (ValueError, OSError, KeyError, ImportError) as error:
        _send(control, {"failed": " ".join(str(error).split())[:500]})
        return
    gc.collect()
    gc.freeze()
    _send(control, {"base": context.base_key()})
    statuses: dict[int, int] = {}
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        if not message:
            return
        _reap(statuses)
        call = json.loads(message)
        if "wait" in call:
            _send(control, {"status": _status(call["wait"], statuses)})
            continue
        connection = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            control.close()
            _run_worker(context, connection, bool(call["fork"]["steps_back"]))
        connection.close()
        _send(control, {"pid": pid})


def _run_worker(context: Any, connection: socket.socket, steps_back: bool) -> None:
    from lorikeet.adapters.loader import worker

    code = 1
    try:
        process.end_with_parent()
        if steps_back:
            process.step_back()
        worker.serve(context, connection)
        code = 0
    finally:
        os._exit(code)


def _reap(statuses: dict[int, int]) -> None:
    """Record the exit codes of workers that nobody has asked for yet, or ever will."""
    with contextlib.suppress(ChildProcessError):
        while (exited := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[exited[0]] = os.waitstatus_to_exitcode(exited[1])
            if len(statuses) > _MAX_STATUSES:
                del statuses[next(iter(statuses))]


def _status(pid: int, statuses: dict[int, int]) -> int:
    """Exit code of a worker, negative for the signal that ended it."""
    if pid in statuses:
        return statuses.pop(pid)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return 0


def _send(control: socket.socket, answer: dict[str, Any]) -> None:
    control.send(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
