"""Receipts of one router: who gets one, what the shards' files hold, and the operator's file of them.

Knows links and generations; what a receipt says is receipt.py's.
"""

import asyncio
import os
from typing import Any

import grpc
import orjson
import structlog

from router.config import RouterConfig
from router.errors import GenerationFailed
from router.generation import GenerationRequest
from router.inflight import Generation
from router.receipt import Served, add_tokens, make_receipt, may_have_receipt
from router.shard_link import ShardLink

log = structlog.get_logger()

LAST_WORDS_S = 10.0
"""So long the end of the router waits for lines that are not written yet."""


class Receipts:
    """Of all requests. Raises OSError at once where the operator's file cannot be written."""

    def __init__(self, config: RouterConfig, tokenizer_digest: str, links: list[ShardLink]) -> None:
        self._config = config
        self._tokenizer_digest = tokenizer_digest
        self._links = links
        self._file = None if config.receipts_path is None else _opened(config.receipts_path)
        self._unwritten: list[tuple[dict[str, Any], ShardLink | None]] = []
        self._writing: asyncio.Task[None] | None = None

    def prepare(self, request: GenerationRequest) -> None:
        """A request begins that will have a receipt: let the shards read their files meanwhile."""
        if request.receipt or (self._file is not None and may_have_receipt(request)):
            for link in self._links:
                if link.client.connected:
                    link.digest()

    async def of(self, generation: Generation) -> dict[str, Any]:
        """For the client. Raises GenerationFailed where it cannot be said what computed the text."""
        base_digest = await self._base_digest(generation.link)
        return {**add_tokens(self._made(generation), generation), "base_digest": base_digest}

    def finished(self, generation: Generation) -> None:
        """A line for the operator's file, where there is one."""
        if self._file is None or not may_have_receipt(generation.request):
            return
        try:
            self._unwritten.append((self._made(generation), generation.link))
        except GenerationFailed as error:  # the text itself is whole
            log.error("receipt_not_written", request_id=generation.request.request_id, reason=str(error))
            return
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(self._file))

    async def close(self) -> None:
        """Write what is left."""
        if self._file is None:
            return
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=LAST_WORDS_S)
            if not self._writing.done():
                log.error("receipts_not_written", num_receipts=len(self._unwritten), reason="the server ends")
                self._writing.cancel()
        os.close(self._file)
        self._file = None

    def _made(self, generation: Generation) -> dict[str, Any]:
        info = self._link(generation.link).info
        assert info is not None
        config = self._config
        return make_receipt(generation, Served(config.model_id, self._tokenizer_digest, config.max_total_tokens, info))

    def _link(self, link: ShardLink | None) -> ShardLink:
        """That of a text whose shard went as it finished is any: all hold the same files. Raises GenerationFailed."""
        found = link or next((each for each in self._links if each.info is not None), None)
        if found is None:
            raise GenerationFailed("there is no receipt: no shard is left that could say what computed the text")
        return found

    async def _base_digest(self, link: ShardLink | None) -> str:
        try:
            found = await asyncio.shield(self._link(link).digest())
        except grpc.aio.AioRpcError as error:
            raise GenerationFailed(f"there is no receipt: {error.details()}") from None
        except (ConnectionError, grpc.aio.UsageError):
            raise GenerationFailed("there is no receipt: the shard that computed the text is gone") from None
        if any(each.known_digest not in ("", found) for each in self._links):
            raise GenerationFailed("there is no receipt: the shards hold different files")
        return found

    async def _write(self, file: int) -> None:
        while self._unwritten:
            lines = []
            for receipt, link in list(self._unwritten):
                try:
                    base_digest = await self._base_digest(link)
                    lines.append(orjson.dumps({**receipt, "base_digest": base_digest}) + b"\n")
                except GenerationFailed as error:
                    log.error("receipt_not_written", request_id=receipt["request_id"], reason=str(error))
                self._unwritten.pop(0)
            try:
                await asyncio.to_thread(_append, file, b"".join(lines))
            except OSError as error:
                log.error("receipts_not_written", num_receipts=len(lines), reason=str(error))


def _opened(path: str) -> int:
    """For lines behind those that are there, readable by this user alone."""
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OSError(f"can't write receipts to {path}: {error.strerror}") from None


def _append(file: int, lines: bytes) -> None:
    left = memoryview(lines)
    while left:
        left = left[os.write(file, left) :]
