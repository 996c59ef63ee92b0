"""Probes, `/info` and other servers' forms of it, `/metrics`, and `/v1/models`."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.config_file import whole_number
from lorikeet.proto.draft_sources import BY_VALUE
from lorikeet.proto.params import MAX_ALTERNATIVES, Pooling
from lorikeet.proto.version import version
from lorikeet.router.adapters.selection import Listed
from lorikeet.router.api.answer_parts import collect, json_response
from lorikeet.router.api.service import Routes, Service
from lorikeet.router.api.streaming import ClientWatch, EventStream, Replay
from lorikeet.router.errors import (
    AdminOnly,
    Failed,
    ModelNotFound,
    Refused,
    RouteNotServed,
    ShuttingDown,
    StreamTrimmed,
    Unhealthy,
    ValidationError,
)
from lorikeet.router.kept_streams import MAX_TTL_S, KeptStream, OutOfRange, Trimmed
from lorikeet.router.metrics.groups import MayName, everything
from lorikeet.router.requests.request import Caller, GenerationRequest
from lorikeet.router.usage_log import shown_url

MAX_EVENTS = 10**15
METRICS_CHARS, ADAPTER_CHARS = 8000, 40
"""Characters of a text that take as long to tokenize as metrics take to write: without adapters, and for each alias."""
_FROM_LAUNCHER = ("waiting_served_ratio", "max_waiting_tokens", "eager_prefill")
"""Keys of LoRAX's `/info` that are flags of the launcher only."""


class ProbeRoutes(Routes):
    """`/health`, `/ping` and `/` (liveness), `/ready` and `/startup`: 200 with an empty body, or 503."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._probe: asyncio.Task[None] | None = None

    async def health(self, request: Request) -> Response:
        """200 while draining too, since running requests are still answered."""
        if not self._service.dispatcher.healthy:
            raise Unhealthy()
        return Response()

    async def ready(self, request: Request) -> Response:
        """Whether new requests are accepted."""
        self._check()
        return Response()

    async def startup(self, request: Request) -> Response:
        """Generates one token end to end, or computes one vector: one at a time, for all probes that wait."""
        self._check()
        if self._probe is None:
            self._probe = asyncio.create_task(self._compute_probe())
            self._probe.add_done_callback(self._probe_ended)
        try:
            async with ClientWatch(request.receive):
                await asyncio.shield(self._probe)
        except (Failed, Refused) as error:
            raise (ShuttingDown() if isinstance(error, ShuttingDown) else Unhealthy()) from error
        return Response()

    async def _compute_probe(self) -> None:
        prompt_ids = await self._service.tokenizer.encode("Who?")
        model = self._service.pooled_model
        probe = GenerationRequest(
            prompt_ids, max_new_tokens=1, pooling=None if model is None else Pooling(model.task), is_probe=True
        )
        self._service.receipts.prepare(probe)
        generation = self._service.dispatcher.submit(probe)
        try:
            await collect(generation)
        finally:
            generation.cancel()
            generation.charge.release()

    def _probe_ended(self, probe: "asyncio.Task[None]") -> None:
        self._probe = None
        if not probe.cancelled():
            probe.exception()  # every waiting probe may have gone

    def _check(self) -> None:
        if self._service.dispatcher.draining:
            raise ShuttingDown()
        if not self._service.dispatcher.ready or not self._service.adapters_checked:
            raise Unhealthy()


class InformationRoutes(Routes):
    """The handlers; none of them sends anything to a shard."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._created = int(time.time())
        self._started = time.monotonic()

    async def info(self, request: Request) -> Response:
        """LoRAX's keys in its order, then ours; paths and addresses for administrators only."""
        config, shard = self._service.config, self._service.dispatcher.info
        effective = config.effective_configuration or {}
        flags = effective.get("flags", {})
        launcher = {name: flags.get(name.replace("_", "-")) for name in _FROM_LAUNCHER}
        limits = ("concurrent_requests", "best_of", "stop_sequences", "input_length", "total_tokens")
        heads = self._service.selection.directory.default_heads
        device = None if shard is None else shard.device.partition(":")[0]
        content = {
            "model_id": config.model_id,
            "model_sha": config.model_sha,
            "model_dtype": None if shard is None else shard.dtype,
            "model_device_type": device,
            "model_pipeline_tag": None,
            **{f"max_{name}": getattr(config, f"max_{name}") for name in limits},
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
        key = self._service.caller(request).key
        if key is None or not key.admin:
            content |= {"request_logger_url": None, "effective_configuration": config.public_configuration or {}}
            content = {name: _without_paths(value, config.model_id) for name, value in content.items()}
        return json_response(content)

    def _shard(self, shard: pb.ShardInfo) -> dict[str, Any]:
        plain = [field.name for field in shard.DESCRIPTOR.fields if field.message_type is None]
        fields = {name: getattr(shard, name) for name in plain}
        return {**fields, "speculate": self._service.offer.num_tokens}

    async def version(self, request: Request) -> Response:
        """vLLM's."""
        return json_response({"version": version()})

    async def load(self, request: Request) -> Response:
        """vLLM's: requests that are queued or running."""
        return json_response({"server_load": self._service.dispatcher.num_active})

    async def model_info(self, request: Request) -> Response:
        """SGLang's."""
        config = self._service.config
        return json_response(
            {
                "model_path": config.model_id,
                "tokenizer_path": config.model_id,
                "is_generation": self._service.pooled_model is None,
                "preferred_sampling_params": None,
                "weight_version": config.model_sha,
            }
        )

    async def server_info(self, request: Request) -> Response:
        """SGLang's, as far as there is an equivalent; the configuration is in `/info`."""
        config, dispatcher = self._service.config, self._service.dispatcher
        shards = [link.info for link in dispatcher.links if link.info is not None]
        verified = self._service.metrics.speculation.values
        num_steps, num_accepted = (sum(verified[name].values()) for name in ("steps", "accepted_tokens"))
        accept_length = {"avg_spec_accept_length": 1 + num_accepted / num_steps} if num_steps else {}
        return json_response(
            {
                "version": version(),
                "status": "ready" if dispatcher.ready else "starting",
                "model_path": config.model_id,
                "tokenizer_path": config.model_id,
                "served_model_name": config.model_name,
                "is_embedding": self._service.pooled_model is not None,
                "context_length": config.max_total_tokens,
                "dp_size": len(shards),
                "tp_size": max((shard.num_ranks for shard in shards), default=1),
                "max_total_num_tokens": sum(shard.num_pages * shard.page_size for shard in shards),
                "max_running_requests": config.max_concurrent_requests,
                "internal_states": [accept_length],
            }
        )

    async def metrics(self, request: Request) -> Response:
        """Prometheus text, or LoRAX's JSON by the Accept header."""
        service = self._service
        service.dispatcher.in_flight.update(time.monotonic())  # callers have gone since the last request
        service.dispatcher.update_gauges()
        if service.dispatcher.admission is not None:
            service.dispatcher.admission.note_gauges(service.selection.directory.entries(), service.dispatcher.queued)
        numbers = service.metrics.snapshot()
        write = partial(numbers.render, request.headers.get("accept", ""), self._may_name(request))
        num_chars = METRICS_CHARS + ADAPTER_CHARS * len(numbers.adapters.by_label)
        content, media_type = await service.tokenizer.pool.run(write, service.caller(request).identity, num_chars)
        return Response(content, media_type=media_type)

    def _may_name(self, request: Request) -> MayName:
        """A caller sees the names of metrics that the catalogue shows it."""
        caller, selection = self._service.caller(request), self._service.selection
        if caller.key is not None and caller.key.admin:
            return everything
        names = {line.alias for line in selection.directory.listed()}
        shown = {line.alias for line in selection.listed(caller)}
        return everything if names == shown and not selection.keys else shown.__contains__

    async def models(self, request: Request) -> Response:
        """The base model, then every adapter that the caller may see: those that the operator named, and those below
        the local roots.
        """
        caller = self._service.caller(request)
        admission = self._service.dispatcher.admission
        digests = {} if admission is None else admission.loading.digests_by_name()
        shown = [self._adapter(line, digests) for line in await self._listed(caller)]
        names = self._service.config.served_model_names or (self._service.config.model_id,)
        return json_response({"object": "list", "data": [*map(self._model, names), *shown]})

    async def model(self, request: Request) -> Response:
        model_id = request.path_params["model_id"]
        if model_id in self._service.config.model_names:
            return json_response(self._model(model_id))
        caller = self._service.caller(request)
        for line in await self._listed(caller):
            if line.alias == model_id:
                return json_response(self._adapter(line, self._service.admission.loading.digests_by_name()))
        raise ModelNotFound(model_id[:256])

    async def _listed(self, caller: Caller) -> list[Listed]:
        """The operator's entries, then adapters below the local roots."""
        selection = self._service.selection
        return [*selection.listed(caller), *await selection.below_roots(caller)]

    def _adapter(self, line: Listed, digests: Mapping[str, set[str]]) -> dict[str, Any]:
        """In vLLM's format, with the reason why it is not served, and the nearest place of its content if it is loaded;
        `digests` are those of known contents.
        """
        entry = line.entry
        refs = [] if entry is None else [version.ref for version in entry.versions]
        known = [digest for ref in refs for digest in digests.get(f"{ref.source.value}:{ref.id}", ())]
        return {
            **self._model(line.alias, line.created),
            "root": str(refs[0]) if refs else None,
            "parent": self._service.config.model_name,
            "adapter_source": refs[0].source.value if refs else None,
            "description": (entry is not None and entry.description) or None,
            "problem": line.problem or None,
            "warning": self._warning(known),
            "tier": self._service.admission.tier(known) if known else None,
        }

    def _warning(self, known: Sequence[str]) -> str | None:
        """What is wrong with an adapter that is served, once its content is known."""
        nothing = self._service.admission.loading.without_effect() if known else set[str]()
        return "it changes nothing: it answers as the base model" if nothing.intersection(known) else None

    def _model(self, name: str, created: int = 0) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created or self._created,
            "owned_by": "lorikeet",
            "max_model_len": self._service.config.max_total_tokens,
        }

    async def capabilities(self, request: Request) -> Response:
        """Limits and offers; nothing about other callers."""
        service = self._service
        config, info, offer, caller = service.config, service.dispatcher.info, service.offer, service.caller(request)
        key, heads = caller.key, service.selection.directory.default_heads
        keys, dispatcher = service.selection.keys, service.dispatcher
        has_keys = bool(keys) or keys.has_admin
        content: dict[str, Any] = {
            "model": config.model_name,
            "version": None if info is None else info.version,
            "device": None if info is None else info.device,
            "max_input_length": config.max_input_length,
            "max_total_tokens": config.max_total_tokens,
            "max_stop_sequences": config.max_stop_sequences,
            "max_alternatives": MAX_ALTERNATIVES,
            "adapters": service.dispatcher.admission is not None,
            "chat": bool(service.tokenizer.information.get("chat_template")),
            "grammars": info is not None and info.grammars,
            "speculation": {
                "method": offer.method,
                "default_tokens": offer.num_tokens,
                "max_tokens": offer.max_tokens,
                "draft_model": offer.has_draft_model,
                "heads": heads is not None and service.selection.access.may_use(heads.entry, key),
                "history": offer.has_history and bool(caller.tenant(None)),
                "default_history": offer.history,
                "sources": [row.name for row in BY_VALUE.values()],
            },
            "resumable_ttl": MAX_TTL_S,
            "key": None if key is None else key.name,
            "has_keys": has_keys,
            "may_watch": not has_keys or (key is not None and key.admin),
            "has_admin_key": keys.has_admin,
            "may_administer": key is not None and key.admin,
            "may_upload": bool(config.sources.local_roots),
            "ready": dispatcher.healthy and service.adapters_checked and not dispatcher.draining,
            "draining": dispatcher.draining,
            "uptime_s": round(time.monotonic() - self._started, 1),
        }
        return json_response(content)

    async def watch(self, request: Request) -> Response:
        """What the server does now, as events. For administrators only where the server has keys."""
        keys = self._service.selection.keys
        if keys.has_admin:
            refusal = AdminOnly("the live view needs the admin key as bearer token")
            self._service.authentication.check_admin(request, refusal)
        elif keys:
            raise AdminOnly("the live view is closed: the server has API keys, but no admin key")
        return EventStream(self._service.live.events(), {"x-accel-buffering": "no"})

    async def read_stream(self, request: Request) -> Response:
        """The answer from event `from` on, and what is added to it. Raises StreamNotFound, StreamTrimmed, …"""
        stream, text = self._stream(request), request.query_params.get("from", "0")
        first_event = whole_number(text, 0, MAX_EVENTS)
        if first_event is None:
            raise ValidationError("`from` must be the number of events that were received", "from")
        try:
            return Replay(stream, first_event)
        except Trimmed as trimmed:
            raise StreamTrimmed(str(trimmed.first)) from None
        except OutOfRange:
            raise ValidationError(
                f"`from` is {first_event}: the stream has {stream.num_events} events", "from"
            ) from None

    async def cancel_stream(self, request: Request) -> Response:
        """End the request, if it runs, and forget its answer."""
        self._service.streams.cancel(self._stream(request))
        return Response(status_code=204)

    def _stream(self, request: Request) -> KeptStream:
        return self._service.streams.find(self._service.caller(request).identity, request.path_params["stream_id"])


def _without_paths(value: Any, model_id: str) -> Any:
    """The last part of each absolute path in a value; the model's name is what clients write, whatever it is."""
    if isinstance(value, dict):
        return {name: _without_paths(item, model_id) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item, model_id) for item in value]
    is_path = isinstance(value, str) and value.startswith(("/", "~", "unix:")) and value != model_id
    return value.rpartition("/")[2] if is_path else value


_TEXT_ALONE = "the model reads and writes text alone"
_NO_STORAGE = "the server stores no requests, answers or files"
ALTERNATIVES = {
    "/v1/audio": _TEXT_ALONE,
    "/v1/images": _TEXT_ALONE,
    "/v1/videos": _TEXT_ALONE,
    "/v1/realtime": _TEXT_ALONE,
    "/v1/files": _NO_STORAGE,
    "/v1/uploads": _NO_STORAGE,
    "/v1/vector_stores": _NO_STORAGE,
    "/v1/conversations": f"{_NO_STORAGE}: send the whole conversation",
    "/v1/assistants": f"{_NO_STORAGE}: use /v1/responses or /v1/chat/completions",
    "/v1/threads": f"{_NO_STORAGE}: use /v1/responses or /v1/chat/completions",
    "/v1/batches": "send the requests at once: they share the server's batch, and `priority` lets others go first",
    "/v1/messages/batches": "send the requests at once: they share the server's batch",
    "/v1/embed": "use /v2/embed with the same texts, or /v1/embeddings",
    "/v1/fine_tuning": "train an adapter with PEFT, and name it as `model`",
    "/v1/evals": "lm-eval measures models over /v1/completions",
    "/v1/moderations": "serve a classifier, or ask the model itself",
}
"""By the beginning of a path. docs/routes.md lists them."""
METHODS = ("GET", "POST", "DELETE")


async def out_of_scope(request: Request) -> Response:
    """501, rather than 404, which would suggest a misspelt path."""
    path = request.url.path
    prefix = max((prefix for prefix in ALTERNATIVES if path.startswith(prefix)), key=len)
    raise RouteNotServed(prefix, ALTERNATIVES[prefix])
