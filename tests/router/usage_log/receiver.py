"""An HTTP server for usage events."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


class Receiver:
    """Records what it receives; answers with the given statuses, then with 200."""

    def __init__(self, *statuses: int) -> None:
        self.events: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        left = list(statuses)
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                receiver.paths.append(self.path)
                receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
                receiver.events.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                receiver.may_answer.wait(60)
                self.send_response(left.pop(0) if left else 200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"
