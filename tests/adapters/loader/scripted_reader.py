"""What reads adapters, for `test_workers`: it says which base it has, and its workers answer with their process ids."""

import json
import os
import socket
import sys
from typing import Any

from lorikeet.proto.children import answer, serve_forks
from lorikeet.proto.process import end_with_parent


def work(connection: socket.socket, options: dict[str, Any]) -> None:
    with connection.makefile("rwb") as stream:
        for _ in stream:
            stream.write(b"{}\n" + json.dumps({"validation": {"rank": os.getpid()}}).encode() + b"\n")
            stream.flush()


if __name__ == "__main__":
    end_with_parent()
    control = socket.socket(fileno=int(sys.argv[1]))
    answer(control, {"base": sys.argv[2].split(",")})
    serve_forks(control, work)
