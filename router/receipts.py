"""Receipts of one router: which requests get one, the digest of the base's files, and the operator's file.

A receipt for the client holds prompt and output as token ids; one for the operator's file holds their hashes.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import grpc
import orjson
import structlog

from lorikeet.proto import digest
from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.params import NUMBERS, Speculation
from lorikeet.proto.version import version
from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import GenerationFailed, UnsupportedField
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import Adapter, GenerationRequest
from lorikeet.router.shards.link import ShardLink
from lorikeet.router.usage_log import LineFile

log = structlog.get_logger()

FORMAT = 1
"""Version of the format; it changes when the meaning of a field does."""


@dataclass(frozen=True)
class Served:
    """Properties of the server that determine tokens, or help to find out why they differ."""

    model_id: str
    tokenizer_digest: str
    max_total_tokens: int
    info: pb.ShardInfo
    """Information on the shard that computed the text."""


def check_receipt(is_requested: bool, speculation: Speculation, num_texts: int) -> None:
    """Raises UnsupportedField where a request that asks for a receipt cannot have one."""
    if not is_requested:
        return
    if num_texts != 1:
        raise UnsupportedField("receipt", f"covers one text: this request asks for {num_texts}")
    if speculation.verify == "rejection":
        raise UnsupportedField(
            "receipt",
            "needs a reproducible text, and `rejection` preserves only its distribution: "
            "set `speculative_verification` to shared-noise, or a `seed`",
        )


def may_have_receipt(request: GenerationRequest) -> bool:
    """Whether a receipt determines the text, and the text is a client's."""
    return request.speculation.verify != "rejection" and not request.is_probe


def make_receipt(generation: Generation, served: Served) -> dict[str, Any]:
    """Receipt of a finished text, without its tokens; the caller adds the digest of the base's files."""
    request, finish, info = generation.request, generation.finish_reason, served.info
    heads = generation.adapters.heads_pin
    assert finish is not None
    return {
        "receipt": FORMAT,
        "created": int(time.time()),
        "request_id": request.request_id,
        "version": version(),
        "model_id": served.model_id,
        "base_digest": "",
        "tokenizer_digest": served.tokenizer_digest,
        "dtype": info.dtype.removeprefix("torch."),
        "quantization": info.quantization or None,
        "num_ranks": info.num_ranks or 1,
        "kv_cache_dtype": info.kv_cache_dtype or None,
        "device": info.device.partition(":")[0],
        "max_total_tokens": served.max_total_tokens,
        "adapter": None if request.adapter is None else _adapter(request.adapter, generation.digest),
        # Informational: speculation does not change the text.
        "speculation": {"method": request.speculation.method, "heads_digest": None if heads is None else heads[1]},
        "parameters": _parameters(request, info) | _end_of(generation),
        "prompt": {"num_tokens": len(request.prompt_ids), "sha256": digest.of_tokens(request.prompt_ids)},
        "output": {
            "num_tokens": len(generation.emitted_ids),
            "sha256": digest.of_tokens(generation.emitted_ids),
            "finish_reason": finish.value,
        },
    }


def add_tokens(receipt: dict[str, Any], generation: Generation) -> dict[str, Any]:
    """With the token ids of prompt and output, for the client."""
    prompt = {**receipt["prompt"], "token_ids": generation.request.prompt_ids}
    return {**receipt, "prompt": prompt, "output": {**receipt["output"], "token_ids": generation.emitted_ids}}


def _adapter(adapter: Adapter, digest: str) -> dict[str, Any]:
    """The adapter as a request names it, and its digest. An alias needs no source."""
    sources = {pin.source.value for pin in adapter.pins}
    fields: dict[str, Any] = {
        "id": adapter.name,
        "source": sources.pop() if len(sources) == 1 and not adapter.alias else None,
        "digest": digest,
    }
    merging = adapter.merging
    if merging is not None:
        fields["merged"] = {
            "ids": adapter.name.split(","),
            "weights": merging.weights,
            "merge_strategy": merging.strategy,
            "density": merging.density,
            "majority_sign_method": merging.majority_sign_method,
        }
    return fields


def _end_of(generation: Generation) -> dict[str, Any]:
    """How an output with reasoning ends: stop strings count after that only, which no parameter of a prompt says."""
    request = generation.request
    if request.reasoning is None or not any(request.stop_strings):
        return {}
    has_stopped = generation.stop_reason in request.stop_strings
    return {"stop": (), "max_new_tokens": generation.num_generated if has_stopped else request.max_new_tokens}


def _parameters(request: GenerationRequest, info: pb.ShardInfo) -> dict[str, Any]:
    sampling = request.sampling
    watermark = {"gamma": info.watermark_gamma, "delta": info.watermark_delta}
    return {
        "seed": sampling.seed,
        "max_new_tokens": request.max_new_tokens,
        "stop": request.stop_strings,
        "ignore_eos": request.ignore_eos,
        "do_sample": sampling.do_sample,
        **{name: getattr(sampling, name) for name in NUMBERS},
        "logit_bias": sampling.logit_bias,
        "min_tokens": sampling.min_tokens,
        "stop_token_ids": request.stop_token_ids,
        "allowed_token_ids": sampling.allowed_ids,
        "bad_words": request.bad_words,
        "skip_special_tokens": request.skip_special_tokens,
        "grammar": {"kind": request.grammar_kind, "value": request.grammar_value} if request.grammar_kind else None,
        "watermark": watermark if sampling.watermark else None,
    }


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
        shard = next((link for link in known if link.address == address), known[0] if known else None)
        if shard is None:
            raise GenerationFailed("there is no receipt: no shard is connected")
        return shard

    async def _base_digest(self, address: str) -> str:
        try:
            base_digest = await asyncio.shield(self._link(address).digest())
        except grpc.aio.AioRpcError as error:
            raise GenerationFailed(f"there is no receipt: {error.details()}") from None
        except (ConnectionError, grpc.aio.UsageError):
            raise GenerationFailed("there is no receipt: the shard that computed the text is gone") from None
        if any(link.known_digest not in ("", base_digest) for link in self._links):
            raise GenerationFailed("there is no receipt: the shards hold different files")
        return base_digest

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
