"""Receipts of one router: who gets one, what the shards' files hold, and the operator's file of them.

Knows links and generations; what a receipt says is receipt.py's.
"""

import asyncio
import os
from typing import Any

import grpc
import orjson
import structlog

from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import GenerationFailed
from lorikeet.router.receipts.receipt import Served, add_tokens, make_receipt, may_have_receipt
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.types import GenerationRequest
from lorikeet.router.shards.connection import ShardLink

log = structlog.get_logger()

FLUSH_TIMEOUT_S = 10.0
"""So long the end of the router waits for lines that are not written yet."""


class Receipts:
    """Of all requests. Raises OSError at once where the operator's file cannot be written."""

    def __init__(self, config: RouterConfig, tokenizer_digest: str, links: list[ShardLink]) -> None:
        self._config = config
        self._tokenizer_digest = tokenizer_digest
        self._links = links
        self._file = None if config.receipts_path is None else _File(config.receipts_path)
        self._unwritten: list[tuple[dict[str, Any], str]] = []
        self._writing: asyncio.Task[None] | None = None

    def prepare(self, request: GenerationRequest) -> None:
        """A request begins that will have a receipt: let the shards read their files meanwhile."""
        if request.receipt or (self._file is not None and may_have_receipt(request)):
            for link in self._links:
                if link.client.connected:
                    link.digest()

    async def of(self, generation: Generation) -> dict[str, Any]:
        """For the client. Raises GenerationFailed where it cannot be said what computed the text."""
        base_digest = await self._base_digest(generation.routing.shard_address)
        return {**add_tokens(self._made(generation), generation), "base_digest": base_digest}

    def finished(self, generation: Generation) -> None:
        """A line for the operator's file, where there is one."""
        if self._file is None or not may_have_receipt(generation.request):
            return
        try:
            self._unwritten.append((self._made(generation), generation.routing.shard_address))
        except GenerationFailed as error:  # the text itself is whole
            log.error("receipt_not_written", request_id=generation.request.request_id, reason=str(error))
            return
        if not self.is_writing:
            self._writing = asyncio.create_task(self._write(self._file))

    @property
    def is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    async def close(self) -> None:
        """Write what is left."""
        if self._file is None:
            return
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=FLUSH_TIMEOUT_S)
            if not self._writing.done():
                log.error("receipts_not_written", num_receipts=len(self._unwritten), reason="the server ends")
                self._writing.cancel()
        self._file.close()
        self._file = None

    def _made(self, generation: Generation) -> dict[str, Any]:
        info = self._link(generation.routing.shard_address).info
        assert info is not None
        config = self._config
        return make_receipt(generation, Served(config.model_id, self._tokenizer_digest, config.max_total_tokens, info))

    def _link(self, address: str) -> ShardLink:
        """The shard of a text, or any other if that one is gone: all have the same files. Raises GenerationFailed."""
        known = [link for link in self._links if link.info is not None]
        found = next((link for link in known if link.address == address), known[0] if known else None)
        if found is None:
            raise GenerationFailed("there is no receipt: no shard is left that could say what computed the text")
        return found

    async def _base_digest(self, address: str) -> str:
        try:
            found = await asyncio.shield(self._link(address).digest())
        except grpc.aio.AioRpcError as error:
            raise GenerationFailed(f"there is no receipt: {error.details()}") from None
        except (ConnectionError, grpc.aio.UsageError):
            raise GenerationFailed("there is no receipt: the shard that computed the text is gone") from None
        if any(each.known_digest not in ("", found) for each in self._links):
            raise GenerationFailed("there is no receipt: the shards hold different files")
        return found

    async def _write(self, file: "_File") -> None:
        while self._unwritten:
            lines = []
            for receipt, address in list(self._unwritten):
                try:
                    base_digest = await self._base_digest(address)
                    lines.append(orjson.dumps({**receipt, "base_digest": base_digest}) + b"\n")
                except GenerationFailed as error:
                    log.error("receipt_not_written", request_id=receipt["request_id"], reason=str(error))
                self._unwritten.pop(0)
            await asyncio.to_thread(file.append, lines)


class _File:
    """Lines behind those that are there, readable by this user alone. What cannot be written is lost, and said once."""

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self._num_lost = 0
        """Since a line was written last."""
        self._is_torn = False
        """Whether the file ends within a line."""
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OSError(f"can't write receipts to {path}: {error.strerror}") from None

    def append(self, lines: list[bytes]) -> None:
        for line in lines:
            try:
                self._write(line)
            except OSError as error:
                if self._num_lost == 0:
                    log.error("receipts_not_written", reason=str(error))
                self._num_lost += 1
            else:
                self._say_lost("receipts_written_again")

    def close(self) -> None:
        self._say_lost("receipts_not_written")
        os.close(self._descriptor)

    def _say_lost(self, event: str) -> None:
        if self._num_lost:
            log.error(event, num_lost=self._num_lost)
            self._num_lost = 0

    def _write(self, line: bytes) -> None:
        left = memoryview(b"\n" + line if self._is_torn else line)
        while left:
            num_written = os.write(self._descriptor, left)
            self._is_torn = left[num_written - 1] != ord("\n")
            left = left[num_written:]
