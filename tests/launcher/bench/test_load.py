"""The order in which a load sends requests and reads answers."""

import asyncio
from typing import Any, cast

from lorikeet.launcher.bench.load import Api, ConnectionPool, LoadGenerator, Pieces, Response, Seen
from lorikeet.launcher.bench.workload import Planned

CLIENTS, ROUNDS = 4, 3


class Waves:
    """A server whose answers to all clients end together; notes when requests arrive."""

    def __init__(self, order: list[str]) -> None:
        self._order = order
        self._wave: list[asyncio.Future[Response]] = []

    async def post(self, path: str, content: bytes, pieces: Pieces | None = None) -> Response:
        self._order.append("sent")
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._wave.append(answer)
        if len(self._wave) == CLIENTS:
            for future in self._wave:
                future.set_result(Response(200, {}, [(0.0, b"data: 1\n\n")]))
            self._wave = []
        return await answer


class NotingApi(Api):
    """Notes when an answer is read."""

    path = "/"

    def __init__(self, order: list[str]) -> None:
        super().__init__("", {}, ignores_eos=False)
        self._order = order

    def body(self, planned: Planned) -> dict[str, Any]:
        return {}

    def read(self, event: bytes, time_s: float, seen: Seen) -> None:
        self._order.append("read")
        seen.token_times.append(time_s)
        seen.is_complete = True

    def _read(self, data: dict[str, Any], time_s: float, seen: Seen) -> None:
        raise NotImplementedError


def test_clients_whose_answers_end_together_send_before_answers_are_read() -> None:
    order: list[str] = []
    load = LoadGenerator(cast(ConnectionPool, Waves(order)), NotingApi(order), CLIENTS)
    loaded = asyncio.run(load.run([Planned("", 1)] * (CLIENTS * ROUNDS)))
    assert not any(sample.error for sample in loaded.samples)
    assert order.count("read") == CLIENTS * ROUNDS
    for wave in range(1, ROUNDS):
        sent = [index for index, what in enumerate(order) if what == "sent"][CLIENTS * wave : CLIENTS * (wave + 1)]
        assert order[sent[0] : sent[-1] + 1].count("read") <= 1
