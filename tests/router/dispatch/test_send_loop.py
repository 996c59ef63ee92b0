"""When batches leave, by the loop that the server runs."""

import asyncio
import time
from pathlib import Path
from unittest.mock import Mock

import uvloop

from lorikeet.router.config import RouterConfig
from lorikeet.router.dispatch.dispatcher import Dispatcher, SendLoop
from lorikeet.router.text.tokenizer import Tokenizer
from tests.router.text.vocabularies import byte_level


def test_a_timer_that_is_almost_due_fires(tmp_path: Path) -> None:
    """uvloop's timers of less than half a millisecond do not report when they are due."""

    async def run() -> list[float]:
        dispatcher = Dispatcher(RouterConfig("model", str(tmp_path), ("unix:nowhere",)), Tokenizer(byte_level()))
        sent: list[float] = []
        dispatcher.queue.push("", 1, 1)
        send_loop = SendLoop(Mock(queue=dispatcher.queue, links=[], send=lambda now, links: sent.append(now)))
        begun = time.monotonic()
        for seconds in (0.03, 0.0001, 0.0002, 0.06):
            send_loop._send_at(begun + seconds)
        await asyncio.sleep(0.1)
        return [now - begun for now in sent]

    moments = uvloop.run(run())
    assert moments and moments[0] < 0.03
