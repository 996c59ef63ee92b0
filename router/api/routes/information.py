"""What the server is and does: `/info`, `/metrics`, `/tokenize`, `/v1/models`, and the routes it has by name only."""

import time
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.adapters.directory import Listed
from lorikeet.router.api.headers import ignored_fields
from lorikeet.router.api.service import Service
from lorikeet.router.errors import ModelNotFound, NoFastTokenizer, NotServed
from lorikeet.router.requests.caller import Caller
from lorikeet.router.schemas.body import read_json
from lorikeet.router.schemas.fields import Fields
from lorikeet.router.usage.post import shown_url

_FROM_LAUNCHER = ("waiting_served_ratio", "max_waiting_tokens", "eager_prefill")
"""Keys of LoRAX's `/info` that only the launcher knows."""


class InformationRoutes:
    """Answers from what is known already; no shard is asked."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    async def info(self, request: Request) -> Response:
        """LoRAX's keys in its order, then ours."""
        config, shard = self._service.config, self._service.dispatcher.info
        effective = config.effective_configuration or {}
        flags = effective.get("flags", {})
        launcher = {name: flags.get(name.replace("_", "-")) for name in _FROM_LAUNCHER}
        heads = self._service.selection.directory.default_heads
        device = None if shard is None else shard.device.partition(":")[0]
        content = {
            "model_id": config.model_id,
            "model_sha": config.model_sha,
            "model_dtype": None if shard is None else shard.dtype,
            "model_device_type": device,
            "model_pipeline_tag": None,
            "max_concurrent_requests": config.max_concurrent_requests,
            "max_best_of": config.max_best_of,
            "max_stop_sequences": config.max_stop_sequences,
            "max_input_length": config.max_input_length,
            "max_total_tokens": config.max_total_tokens,
            "waiting_served_ratio": launcher["waiting_served_ratio"],
            "max_batch_total_tokens": None if shard is None else shard.num_pages * shard.page_size,
            "max_waiting_tokens": launcher["max_waiting_tokens"],
            "validation_workers": config.validation_workers,
            "eager_prefill": launcher["eager_prefill"],
            "version": None if shard is None else shard.version,
            "sha": None,
            "docker_label": None,
            "request_logger_url": None if config.request_logger_url is None else shown_url(config.request_logger_url),
            "max_body_bytes": config.max_body_bytes,
            "shards": [self._shard(link.info) for link in self._service.dispatcher.links if link.info is not None],
            "speculate": max(self._service.offer.num_tokens, 0 if heads is None else heads.num_heads),
            "speculative_method": self._service.offer.method,
            "draft_model_id": config.draft_model_id or (shard.draft_model_id if shard is not None else "") or None,
            "effective_configuration": effective,
        }
        return _json(content)

    def _shard(self, shard: pb.ShardInfo) -> dict[str, Any]:
        fields = {descriptor.name: getattr(shard, descriptor.name) for descriptor in shard.DESCRIPTOR.fields}
        return {**fields, "speculate": self._service.offer.num_tokens}

    async def metrics(self, request: Request) -> Response:
        """Prometheus text, or LoRAX's JSON by the Accept header."""
        if self._service.dispatcher.admission is not None:
            self._service.dispatcher.admission.note_gauges()
        content, media_type = self._service.metrics.render(request.headers.get("accept", ""))
        return Response(content, media_type=media_type)

    async def tokenize(self, request: Request) -> Response:
        """The raw vocabulary entries and their spans in characters."""
        if not self._service.tokenizer.is_fast:
            raise NoFastTokenizer()
        fields = Fields(await read_json(request, self._service.config.max_body_bytes))
        inputs = fields.required_text("inputs")
        special = fields.optional_flag("add_special_tokens")
        tokens = await self._service.tokenizer.encode_with_offsets(inputs, special is not False)
        content = [{"id": token, "text": text, "start": start, "stop": stop} for token, text, start, stop in tokens]
        return _json(content, ignored_fields(fields.ignored()))

    async def models(self, request: Request) -> Response:
        """The base model, then every adapter that the operator named and the caller may see."""
        caller = self._service.caller(request)
        shown = [self._adapter(line) for line in self._service.selection.directory.listed() if self._sees(caller, line)]
        return _json({"object": "list", "data": [self._model(), *shown]})

    async def model(self, request: Request) -> Response:
        wanted = request.path_params["model_id"]
        if wanted == self._service.config.model_id:
            return _json(self._model())
        caller = self._service.caller(request)
        for line in self._service.selection.directory.listed():
            if line.alias == wanted and self._sees(caller, line):
                return _json(self._adapter(line))
        raise ModelNotFound(wanted[:256])

    async def not_served(self, request: Request) -> Response:
        """Says so by name, so that nobody looks for a typing error."""
        raise NotServed(request.url.path)

    def _sees(self, caller: Caller, line: Listed) -> bool:
        return line.entry is None or self._service.selection.may_see(line.entry, caller)

    def _adapter(self, line: Listed) -> dict[str, Any]:
        """As vLLM has it, and why one that is listed is not served."""
        entry = line.entry
        refs = [] if entry is None else [version.ref for version in entry.versions]
        return {
            "id": line.alias,
            "object": "model",
            "created": line.created,
            "owned_by": "lorikeet",
            "max_model_len": self._service.config.max_total_tokens,
            "root": str(refs[0]) if refs else None,
            "parent": self._service.config.model_id,
            "adapter_source": refs[0].source.value if refs else None,
            "problem": line.problem or None,
        }

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._service.config.model_id,
            "object": "model",
            "created": self._created,
            "owned_by": "lorikeet",
            "max_model_len": self._service.config.max_total_tokens,
        }


def _json(content: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), headers=headers, media_type="application/json")
