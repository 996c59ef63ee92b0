"""The router's components as routes use them, and the defaults that aliases give to bodies."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from starlette.requests import Request

from lorikeet.adapters.sources.registry import Rights, Sources
from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.adapters.chat_templates import Templates
from lorikeet.router.adapters.loading import AdapterAdmission
from lorikeet.router.adapters.preload import AdapterPreloader, Reloading, read_catalogue, read_keys
from lorikeet.router.adapters.selection import Directory, Selection
from lorikeet.router.adapters.tokenizers import AdapterTokenizers
from lorikeet.router.api.access import Authentication, KeyLimits
from lorikeet.router.config import RouterConfig
from lorikeet.router.dispatch.dispatcher import Dispatcher
from lorikeet.router.kept_streams import Streams
from lorikeet.router.live_view import Live, RecentFailures, SnapshotMaker
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.output.outputs import OutputPreparer
from lorikeet.router.receipts import Receipts
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import Caller, caller
from lorikeet.router.schemas.body import BodyMemory, BodyReader
from lorikeet.router.schemas.generation import SpeculationOffer, fill_defaults, make_offer
from lorikeet.router.schemas.grammar import names_grammar
from lorikeet.router.text.grammars import Grammars
from lorikeet.router.text.tokenizer import Tokenizer
from lorikeet.router.usage_log import UsageLog

if TYPE_CHECKING:
    from lorikeet.router.request_tracing import Tracing

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Service:
    """The components, created once per process."""

    dispatcher: Dispatcher
    tokenizer: Tokenizer
    metrics: Metrics
    selection: Selection
    templates: Templates
    tokenizers: AdapterTokenizers
    outputs: OutputPreparer
    preloader: AdapterPreloader | None
    """None if only the base model is served."""
    reloading: Reloading
    receipts: Receipts
    usage: UsageLog
    grammars: Grammars
    authentication: Authentication
    key_limits: KeyLimits
    bodies: BodyReader
    tracing: "Tracing | None"
    """None where no collector is configured."""
    failures: RecentFailures
    live: Live
    streams: Streams
    """Answers that clients may resume on another connection."""
    not_learning: set[str] = field(default_factory=set)
    """Aliases that ask for learned heads, of which the log says that the shards learn none."""

    @property
    def config(self) -> RouterConfig:
        """With the lengths that the shards take, once they are known."""
        return self.dispatcher.config

    @property
    def admission(self) -> AdapterAdmission:
        """Admission of requests with adapters, where those are served."""
        assert self.dispatcher.admission is not None
        return self.dispatcher.admission

    @property
    def rights(self) -> Rights:
        """Rights of callers to adapters, where those are served."""
        assert self.selection.rights is not None
        return self.selection.rights

    @property
    def offer(self) -> SpeculationOffer:
        """What speculation the server supports."""
        info = self.dispatcher.info
        return make_offer(self.config) if info is None else make_offer(self.config, info.draft_model_id, info.history)

    @property
    def adapters_checked(self) -> bool:
        """Whether the operator's adapters were checked."""
        return self.preloader is None or self.preloader.settled.is_set()

    def tier(self, generation: Generation) -> str:
        """Where its adapter was when it was sent; before that, where it is: a `slot`, `host`, `disk` or `source`."""
        return generation.routing.adapter_tier or self.admission.place(
            generation.adapters.adapter_digests, generation.adapters.tier
        )

    def native_defaults(self, caller: Caller, body: dict[str, Any]) -> dict[str, Any]:
        """A body of LoRAX's routes with its alias's parameters; invalid bodies are left to the reader."""
        sent = body.get("parameters")
        parameters = {} if sent is None else sent
        if not isinstance(parameters, dict) or parameters.get("merged_adapters") is not None:
            return body
        defaults = self._defaults(caller, parameters.get("adapter_id"), parameters)
        return {**body, "parameters": fill_defaults(parameters, defaults)} if defaults else body

    def openai_defaults(self, caller: Caller, body: dict[str, Any]) -> dict[str, Any]:
        """A body of OpenAI's routes with its alias's parameters, which have LoRAX's names."""
        if body.get("merged_adapters") is not None:
            return body
        defaults = self._defaults(caller, body.get("adapter_id") or body.get("model"), body)
        for name in ("do_sample", "return_full_text", "truncate"):  # not in OpenAI's routes
            defaults.pop(name, None)
        max_tokens = defaults.pop("max_new_tokens", None)
        if max_tokens is not None and body.get("max_completion_tokens") is None:
            defaults["max_tokens"] = max_tokens
        return fill_defaults(body, defaults) if defaults else body

    def _defaults(self, caller: Caller, name: Any, fields: dict[str, Any]) -> dict[str, Any]:
        source = fields.get("adapter_source")
        if not isinstance(name, str | None) or not isinstance(source, str | None):
            return {}
        if self.selection.is_base(name := self.selection.without_base(name)):
            return {}
        entry = self.selection.usable(name, source, caller)
        defaults = {} if entry is None else dict(entry.parameters)
        if names_grammar(fields):
            defaults.pop("response_format", None)
        if caller.key is not None and caller.key.is_marked_isolate:
            defaults.pop("speculative_history", None)
        return defaults

    async def body(self, request: Request) -> dict[str, Any]:
        """The request's JSON object, or what another route made of it.

        Raises a leaf of BodyRejected, or BodyMemoryFull.
        """
        body: dict[str, Any] | None = request.scope["state"].pop("given_body", None)
        if body is not None:
            return body
        return await self.bodies.read(request, self.caller(request).identity)

    @property
    def pooled_model(self) -> pb.PooledModel | None:
        """What the model computes in place of text; None for a model that generates."""
        info = self.dispatcher.info
        return info.pooled_model if info is not None and info.HasField("pooled_model") else None

    def caller(self, request: Request) -> Caller:
        """Who sent `request`."""
        return caller(request, self.selection.keys)


class Routes:
    """Handlers of one router."""

    def __init__(self, service: Service) -> None:
        self._service = service


def make_service(dispatcher: Dispatcher, tokenizer: Tokenizer, config: RouterConfig, metrics: Metrics) -> Service:
    """The components for one dispatcher. Raises OSError or ValueError where a configured file or URL cannot be used."""
    sources = None if config.loader_address is None else Sources(config.sources)
    rights = None
    if sources is not None and dispatcher.admission is not None:
        rejected = dispatcher.admission.loading.rejected
        rights = Rights(sources, config.auth_cache_ttl_s, config.auth_stale_s, rejected=rejected)
    directory = Directory(config, read_catalogue(config))
    selection = Selection(config, rights, directory, read_keys(config))
    preloader = None if dispatcher.admission is None else AdapterPreloader(selection, dispatcher.admission)
    templates = Templates(tokenizer, sources)
    failures = RecentFailures()
    return Service(
        dispatcher=dispatcher,
        tokenizer=tokenizer,
        metrics=metrics,
        selection=selection,
        templates=templates,
        tokenizers=AdapterTokenizers(tokenizer, sources, config.adapter_extra_vocab_size),
        outputs=OutputPreparer(templates, tokenizer),
        preloader=preloader,
        reloading=Reloading(config, selection, preloader),
        receipts=dispatcher.receipts,
        usage=UsageLog(config, metrics, lambda request: caller(request, selection.keys)),
        grammars=Grammars(Path(config.model_path)),
        authentication=Authentication(config, selection),
        key_limits=KeyLimits(),
        bodies=BodyReader(config.max_body_bytes, BodyMemory(config.max_body_memory), config.header_timeout_s),
        tracing=_tracing(config),
        failures=failures,
        live=Live(SnapshotMaker(dispatcher, metrics, failures), dispatcher.links),
        streams=Streams(),
    )


def _tracing(config: RouterConfig) -> "Tracing | None":
    if config.otlp_endpoint is None:
        return None
    from lorikeet.router.request_tracing import Tracing  # the SDK takes a quarter of a second to import

    return Tracing.configured(config)
