"""The router's components as routes use them, and steps that routes share: defaults of aliases, checks, submission."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from starlette.requests import Request

from lorikeet.adapters.rights import Rights
from lorikeet.adapters.sources.registry import Sources
from lorikeet.proto.params import MAX_BAD_WORD_TOKENS, Grammar, Speculation
from lorikeet.router.adapters.admission import Admission
from lorikeet.router.adapters.chat_templates import Templates
from lorikeet.router.adapters.directory import Directory
from lorikeet.router.adapters.preload import AdapterPreloader
from lorikeet.router.adapters.reload import Reloading, read_catalogue, read_keys
from lorikeet.router.adapters.selection import Selection
from lorikeet.router.api.authentication import Authentication, KeyLimits
from lorikeet.router.config import RouterConfig
from lorikeet.router.dispatch.dispatcher import Dispatcher
from lorikeet.router.errors import UnsupportedField, ValidationError
from lorikeet.router.live.failures import RecentFailures
from lorikeet.router.live.live import Live
from lorikeet.router.live.snapshot import SnapshotMaker
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.output.outputs import Outputs, Prepared
from lorikeet.router.receipts.receipts import Receipts
from lorikeet.router.requests.adapter_ref import Adapter, Heads
from lorikeet.router.requests.caller import Caller, caller
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.timeline import Timeline
from lorikeet.router.requests.types import FinishReason, GenerationRequest
from lorikeet.router.schemas.adapters import AdapterFields
from lorikeet.router.schemas.body import BodyReader
from lorikeet.router.schemas.body_memory import BodyMemory
from lorikeet.router.schemas.chat.messages import Conversation
from lorikeet.router.schemas.chat.tools import ToolFields
from lorikeet.router.schemas.constraints import Constraints
from lorikeet.router.schemas.grammar import GrammarFields, InvalidGrammar, names_grammar
from lorikeet.router.schemas.openai import check_texts
from lorikeet.router.schemas.speculation import (
    Offer,
    SpeculationFields,
    fill_defaults,
    make_offer,
    resolve_speculation,
    takes_history,
)
from lorikeet.router.streams.streams import Streams
from lorikeet.router.text.bad_words import bad_word_ids
from lorikeet.router.text.grammars import Grammars
from lorikeet.router.text.tokenizer import Tokenizer
from lorikeet.router.usage.writer import Usage

if TYPE_CHECKING:
    from lorikeet.router.tracing.tracing import Tracing

log = structlog.get_logger()


@dataclass
class Timing:
    """When a request arrived and was validated."""

    arrived_at: float
    validated_at: float = 0.0


@dataclass(frozen=True)
class Service:
    """The components, created once per process."""

    dispatcher: Dispatcher
    tokenizer: Tokenizer
    metrics: Metrics
    selection: Selection
    templates: Templates
    outputs: Outputs
    preloader: AdapterPreloader | None
    """None where the base model is served alone."""
    reloading: Reloading
    receipts: Receipts
    usage: Usage
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
    def admission(self) -> Admission:
        """Admission of requests with adapters, where those are served."""
        assert self.dispatcher.admission is not None
        return self.dispatcher.admission

    @property
    def rights(self) -> Rights:
        """Rights of callers to adapters, where those are served."""
        assert self.selection.rights is not None
        return self.selection.rights

    @property
    def offer(self) -> Offer:
        """What speculation the server supports."""
        info = self.dispatcher.info
        return make_offer(self.config) if info is None else make_offer(self.config, info.draft_model_id, info.history)

    @property
    def adapters_checked(self) -> bool:
        """Whether the operator's adapters were checked."""
        return self.preloader is None or self.preloader.settled.is_set()

    def tier(self, generation: Generation) -> str:
        """Where its adapter was when it was sent; before that, where it is: a `slot`, `host`, `disk` or `source`."""
        return generation.routing.adapter_tier or self.admission.place(generation.digest, generation.adapters.tier)

    def native_defaults(self, caller: Caller, body: dict[str, Any]) -> dict[str, Any]:
        """A body of LoRAX's routes with its alias's parameters; invalid bodies are left to the reader."""
        given = body.get("parameters")
        parameters = {} if given is None else given
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
        if not isinstance(name, str | None) or not isinstance(source, str | None) or self.selection.is_base(name):
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
        given: dict[str, Any] | None = getattr(request.state, "given_body", None)
        if given is not None:
            del request.state.given_body
            return given
        return await self.bodies.read(request, self.caller(request).identity)

    def caller(self, request: Request) -> Caller:
        """Who sent `request`."""
        return caller(request, self.selection.keys)

    async def adapter(self, caller: Caller, fields: AdapterFields) -> Adapter | None:
        """The adapter that the caller asks for; None is the bare base model. Raises RouterError."""
        return await self.selection.choose(fields, caller)

    async def heads(self, caller: Caller, fields: AdapterFields, speculation: Speculation) -> Heads | None:
        """The Medusa heads used with the request's adapter; None where it uses none. Raises RouterError."""
        if not fields.name and not speculation.num_heads:
            return None
        heads = await self.selection.choose_heads(fields, caller)
        return heads if speculation.num_heads else None

    def speculation(self, wanted: SpeculationFields, *, is_seeded: bool) -> Speculation:
        """The speculation settings of a request. Raises ValidationError."""
        return resolve_speculation(wanted, self.offer, is_seeded=is_seeded)

    def tenant(self, caller: Caller, wanted: SpeculationFields, speculation: Speculation, salt: str | None) -> str:
        """Whose outputs are proposed as drafts to a request; empty for none. Raises UnsupportedField."""
        tenant = caller.tenant(salt) if takes_history(wanted, self.offer, speculation) else ""
        if wanted.history and not tenant:
            raise UnsupportedField("speculative_history", "is not available to an API key that is marked `isolate`")
        return tenant

    def learning_tenant(
        self, caller: Caller, adapter: Adapter | None, heads: AdapterFields, speculation: Speculation, salt: str | None
    ) -> str:
        """Whose outputs heads are learned from that draft for a request; empty for none, or where it names heads."""
        entry = self.selection.directory.find(adapter.alias) if adapter is not None and adapter.alias else None
        wanted = None if entry is None else entry.learn_heads
        is_wanted = self.config.learn_heads if wanted is None else wanted
        info = self.dispatcher.info
        if info is None or not is_wanted or not speculation.num_heads or heads.name:
            return ""
        if info.learning:
            return caller.tenant(salt)
        if entry is not None and wanted and entry.alias not in self.not_learning:
            self.not_learning.add(entry.alias)
            log.warning("learn_heads_unavailable", alias=entry.alias, reason="the shards cannot learn: see their logs")
        return ""

    async def with_grammar(
        self,
        request: GenerationRequest,
        wanted: GrammarFields | InvalidGrammar | None,
        constraints: Constraints,
        speculation: SpeculationFields,
    ) -> GenerationRequest:
        """With what the output follows. Raises ValidationError or UnsupportedField."""
        if wanted is None:
            return request
        if isinstance(wanted, InvalidGrammar):
            raise ValidationError(wanted.message, wanted.param, wanted.code)
        if constraints.masks is not None:
            raise ValidationError(
                f"`{constraints.masks}` and `{wanted.field}` cannot be set together: no token might be left",
                constraints.masks,
            )
        info = self.dispatcher.info
        if info is not None and not info.grammars:
            raise UnsupportedField(wanted.field, "needs a model with a fast tokenizer (tokenizer.json)")
        text = await self.grammars.serialize(wanted.kind, wanted.value, wanted.field, request.caller)
        grammar = Grammar(text, proposes=speculation.num_tokens != 0)
        return replace(request, grammar=grammar, grammar_kind=wanted.kind, grammar_value=wanted.value)

    async def prepare(
        self,
        conversation: Conversation,
        tools: ToolFields,
        grammar: GrammarFields | None,
        adapter: Adapter | None,
        caller: Caller,
    ) -> Prepared:
        """The prompt and the reader of a conversation; `grammar` is that of its text. Raises RouterError."""
        check_texts(conversation.documents, self.tokenizer.length, self.config, "documents")
        return await self.outputs.prepare(adapter, conversation, tools, grammar, caller.identity)

    def check_room(self, caller: Caller) -> None:
        """Reject a request before it is tokenized. Raises a leaf of Refused."""
        self.dispatcher.check_room(self.tokenizer.pool.num_pending, caller.identity)

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raises ValidationError where one of the ids is not in the vocabulary."""
        info = self.dispatcher.info
        if info is not None and max(ids, default=0) >= info.vocab_size:
            raise ValidationError(f"`{field}` has a token id that is not below {info.vocab_size}", field)

    async def constrained(self, request: GenerationRequest, wanted: Constraints) -> GenerationRequest:
        """With what the client asks for of the output's tokens and of its end. Raises ValidationError."""
        self.check_ids(wanted.stop_token_ids, "stop_token_ids")
        self.check_ids(wanted.allowed_token_ids, "allowed_token_ids")
        self.check_ids([token_id for token_id, _ in wanted.logit_bias], "logit_bias")
        if wanted.masks is not None:
            self._check_masks(wanted.masks)
        words = await bad_word_ids(self.tokenizer, wanted.bad_words, request.caller)
        if any(len(word) > MAX_BAD_WORD_TOKENS for word in words):
            raise ValidationError(f"a word of `bad_words` may have up to {MAX_BAD_WORD_TOKENS} tokens", "bad_words")
        # those of the model even if `ignore_eos` is set
        end_ids = self.tokenizer.eos_ids.union(wanted.stop_token_ids) if wanted.min_tokens else frozenset[int]()
        sampling = replace(
            request.sampling,
            allowed_ids=wanted.allowed_token_ids,
            bad_words=words,
            min_tokens=wanted.min_tokens,
            min_tokens_stop_ids=tuple(sorted(end_ids)),
        )
        if sampling.excludes_all(end_ids):
            names = " and ".join(f"`{name}`" for name in ("bad_words", "min_tokens") if getattr(wanted, name))
            raise ValidationError(f"`allowed_token_ids` leaves no token next to {names}", "allowed_token_ids")
        return replace(
            request,
            sampling=sampling,
            bad_words=wanted.bad_words,
            include_stop=request.include_stop if wanted.include_stop is None else wanted.include_stop,
            include_stop_token=bool(wanted.include_stop),
            ignore_eos=wanted.ignore_eos,
            stop_token_ids=wanted.stop_token_ids,
            skip_special_tokens=wanted.skip_special_tokens,
        )

    def _check_masks(self, field: str) -> None:
        """Raises UnsupportedField while a shard is connected that does not apply masks."""
        for link in self.dispatcher.links:
            if link.info is not None and not link.info.token_masks:
                raise UnsupportedField(field, f"needs shards of version 0.2: one has version {link.info.version}")

    def validated(self, timing: Timing) -> None:
        """Record that the request is checked and tokenized."""
        timing.validated_at = now()
        self.metrics.request_validated(timing.validated_at - timing.arrived_at)

    def submit(self, request: Request, wanted: list[GenerationRequest], arrived_at: float) -> list[Generation]:
        """Queue all sequences of `request`, or none. Raises a leaf of Refused."""
        deadline, generations = self.begin(request, wanted, arrived_at)
        try:
            for each in wanted:
                generations.append(self.queue(request, each, deadline))
        except BaseException:
            cancel_all(generations)
            raise
        return generations

    def begin(
        self, request: Request, wanted: list[GenerationRequest], arrived_at: float
    ) -> tuple[float | None, list[Generation]]:
        """The deadline of all sequences, and the list of them that usage and limits read."""
        limit = self.config.request_timeout_s
        generations: list[Generation] = []
        if (charge := getattr(request.state, "body_charge", None)) is not None:
            charge.settle()
        request.state.wanted, request.state.generations = wanted, generations
        return None if limit is None else arrived_at + limit, generations

    def queue(self, request: Request, wanted: GenerationRequest, deadline: float | None) -> Generation:
        self.receipts.prepare(wanted)
        timeline = None if getattr(request.state, "trace", None) is None else Timeline()
        generation = self.dispatcher.submit(wanted, deadline=deadline, timeline=timeline)
        if self.config.log_texts:
            generation.read_texts = []
        return generation

    async def submit_named(self, request: Request, wanted: GenerationRequest, arrived_at: float) -> Generation:
        """Queue one sequence and wait until its adapter is loaded. Raises RouterError."""
        [generation] = self.submit(request, [wanted], arrived_at)
        await named([generation])
        return generation


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
    live = Live(SnapshotMaker(dispatcher, metrics, failures), dispatcher.links)
    receipts = Receipts(config, tokenizer.digest, dispatcher.links)
    dispatcher.on_complete = receipts.finished
    return Service(
        dispatcher,
        tokenizer,
        metrics,
        selection,
        templates,
        Outputs(templates, tokenizer),
        preloader,
        Reloading(config, selection, preloader),
        receipts,
        Usage(config, metrics, lambda request: caller(request, selection.keys)),
        Grammars(Path(config.model_path)),
        Authentication(config, selection),
        KeyLimits(),
        BodyReader(config.max_body_bytes, BodyMemory(config.max_body_memory), config.header_timeout_s),
        _tracing(config),
        failures,
        live,
        Streams(),
    )


def _tracing(config: RouterConfig) -> "Tracing | None":
    if config.otlp_endpoint is None:
        return None
    from lorikeet.router.tracing.tracing import Tracing  # the SDK takes a quarter of a second to import

    return Tracing.configured(config)


async def named(generations: list[Generation]) -> None:
    """Wait until the adapter of all is loaded. When that fails all are cancelled."""
    try:
        for generation in generations:
            await generation.named()
    except BaseException:
        cancel_all(generations)
        raise


def cancel_all(generations: list[Generation]) -> None:
    """Cancel what still runs; finished generations are left as they are."""
    for generation in generations:
        generation.cancel()


def now() -> float:
    """The clock of deadlines and timings."""
    return time.monotonic()


def log_fields(request: GenerationRequest, num_generated: int, finish: FinishReason) -> dict[str, int | str]:
    """Fields of the log line of a request that was answered: numbers only."""
    return {"prompt_tokens": len(request.prompt_ids), "generated_tokens": num_generated, "finish_reason": finish.value}


def random_seed() -> int:
    """For a request without one. 53 bits survive every JSON reader."""
    return secrets.randbits(53)
