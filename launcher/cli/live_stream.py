"""The live view of a server, followed in a thread: the last snapshot of `/v1/live`."""

import http.client
import json
import threading
from typing import Any
from urllib.parse import urlsplit

Snapshot = dict[str, Any]
_TIMEOUT_S = 15.0


class LiveStream:
    """Live view of one server. Without such a route, or without the right to it, there is no snapshot."""

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._guard = threading.Lock()
        self._latest: Snapshot | None = None
        threading.Thread(target=self._follow, name="live view", daemon=True).start()

    @property
    def latest(self) -> Snapshot | None:
        """The last snapshot; None where there is none yet, or the stream has ended."""
        with self._guard:
            return self._latest

    def _follow(self) -> None:
        where = urlsplit(self._url)
        kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
        connection = kind(where.netloc, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", f"{where.path}/v1/live", headers=self._headers)
            response = connection.getresponse()
            if response.status == 200:
                for line in response:
                    if line.startswith(b"data: "):
                        self._set(json.loads(line[len(b"data: ") :]))
        except (OSError, http.client.HTTPException, ValueError):
            pass  # the screen shows that the server is away
        finally:
            connection.close()
            self._set(None)

    def _set(self, snapshot: Snapshot | None) -> None:
        with self._guard:
            self._latest = snapshot
