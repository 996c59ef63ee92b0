"""`python -m lorikeet.adapters.loader.fork_server FD CONFIG.json`: loads what workers need once, then forks them.

It has one thread, so that forking is safe: a worker costs milliseconds and few pages of its own. The socket FD carries
messages of one JSON object; a message to fork passes the worker's socket with it.
"""

import gc
import signal
import socket
import sys
import warnings
from typing import Any

from lorikeet.adapters.loader.config import LoaderConfig
from lorikeet.adapters.loader.workers import NICENESS
from lorikeet.proto import logs
from lorikeet.proto.process import answer, end_with_parent, lower_priority, serve_forks


def main() -> None:
    """Serve the parent until it closes the socket."""
    end_with_parent()
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
        answer(control, {"failed": " ".join(str(error).split())[:500]})
        return
    gc.collect()
    gc.freeze()
    answer(control, {"base": context.base_key()})

    def work(connection: socket.socket, options: dict[str, Any]) -> None:
        if options["steps_back"]:
            lower_priority(NICENESS)
        worker.serve(context, connection)

    serve_forks(control, work)


if __name__ == "__main__":
    main()
