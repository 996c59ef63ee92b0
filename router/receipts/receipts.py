"""Receipts of one router: which requests get one, the digest of the base's files, and the operator's file."""

import asyncio
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
from lorikeet.router.usage.file import LineFile

log = structlog.get_logger()

FLUSH_TIMEOUT_S = 10.0
"""How long the router waits at its end for lines that are not written yet."""


class Receipts:
    """Creates and writes receipts."""

    def __init__(self, config: RouterConfig, tokenizer_digest: str, links: list[ShardLink]) -> None:
        """Raises OSError where the operator's file cannot be opened."""
        self._config = config
        self._tokenizer_digest = tokenizer_digest
        self._links = links
        self._file = None if config.receipts_path is None else _File(config.receipts_path)
        self._unwritten: list[tuple[dict[str, Any], str]] = []
        self._writing: asyncio.Task[None] | None = None
        self._must_reopen = False

    def prepare(self, request: GenerationRequest) -> None:
        """Let the shards hash their files while a request runs that will have a receipt."""
        if request.receipt or (self._file is not None and may_have_receipt(request)):
            for link in self._links:
                if link.client.connected:
                    link.digest()

    async def of(self, generation: Generation) -> dict[str, Any]:
        """The client's receipt. Raises GenerationFailed where the base's digest is unknown."""
        base_digest = await self._base_digest(generation.routing.shard_address)
        return {**add_tokens(self._made(generation), generation), "base_digest": base_digest}

    def finished(self, generation: Generation) -> None:
        """Queue a line for the operator's file, where there is one."""
        if self._file is None or not may_have_receipt(generation.request):
            return
        try:
            self._unwritten.append((self._made(generation), generation.routing.shard_address))
        except GenerationFailed as error:  # the text itself is complete
            log.error("receipt_not_written", request_id=generation.request.request_id, reason=str(error))
            return
        if not self.is_writing:
            self._writing = asyncio.create_task(self._write(self._file))

    def reopen(self) -> None:
        """The operator has moved the file away."""
        if self._file is None:
            return
        self._must_reopen = True
        if not self.is_writing:
            self._writing = asyncio.create_task(self._write(self._file))

    @property
    def is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    async def close(self) -> None:
        """Write what is queued and close the file."""
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
        return make_receipt(generation, Served(config.model_id, self._tokenizer_digest, info.max_total_tokens, info))

    def _link(self, address: str) -> ShardLink:
        """The shard, or any other if that one is gone: all have the same files. Raises GenerationFailed."""
        known = [link for link in self._links if link.info is not None]
        found = next((link for link in known if link.address == address), known[0] if known else None)
        if found is None:
            raise GenerationFailed("there is no receipt: no shard is connected")
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
        while self._unwritten or self._must_reopen:
            if self._must_reopen:
                self._must_reopen = False
                await asyncio.to_thread(file.renew)
            lines = []
            for receipt, address in list(self._unwritten):
                try:
                    base_digest = await self._base_digest(address)
                    lines.append(orjson.dumps({**receipt, "base_digest": base_digest}) + b"\n")
                except GenerationFailed as error:
                    log.error("receipt_not_written", request_id=receipt["request_id"], reason=str(error))
                self._unwritten.pop(0)
            await asyncio.to_thread(file.write, lines)


class _File(LineFile):
    """`--receipts`: lines that cannot be written are lost; the first one of a row is logged, and then their number."""

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self._num_lost = 0
        """Since a line was written last."""
        try:
            super().__init__(path)
        except OSError as error:
            raise OSError(f"can't write receipts to {path}: {error.strerror}") from None

    def renew(self) -> None:
        """Open it again; on failure the old one stays open, which is logged."""
        try:
            self.reopen()
        except OSError as error:
            log.error("receipts_not_reopened", reason=error.strerror)

    def write(self, lines: list[bytes]) -> None:
        for line in lines:
            try:
                self.append(line)
            except OSError as error:
                if self._num_lost == 0:
                    log.error("receipts_not_written", reason=str(error))
                self._num_lost += 1
            else:
                self._log_lost("receipts_written_again")

    def close(self) -> None:
        self._log_lost("receipts_not_written")
        super().close()

    def _log_lost(self, event: str) -> None:
        if self._num_lost:
            log.error(event, num_lost=self._num_lost)
            self._num_lost = 0
