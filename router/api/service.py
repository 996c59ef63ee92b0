"""What every route is handed: the parts of the router, and the short ways through them that routes share."""

import secrets
import time
from dataclasses import dataclass

from starlette.requests import Request

from lorikeet.adapters.rights import Rights
from lorikeet.adapters.sources.registry import Sources
from lorikeet.router.adapters.admission import Admission
from lorikeet.router.adapters.chat_templates import Templates
from lorikeet.router.adapters.directory import Directory
from lorikeet.router.adapters.preload import AdapterPreloader
from lorikeet.router.adapters.reload import Reloading, read_catalogue, read_keys
from lorikeet.router.adapters.selection import Selection
from lorikeet.router.config import RouterConfig
from lorikeet.router.dispatch.dispatcher import Dispatcher
from lorikeet.router.errors import ValidationError
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.receipts.receipts import Receipts
from lorikeet.router.requests.adapter_ref import Adapter, Heads
from lorikeet.router.requests.caller import Caller, caller
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.types import FinishReason, GenerationRequest, Speculation
from lorikeet.router.schemas.adapters import AdapterFields
from lorikeet.router.schemas.speculation import Offer, SpeculationFields, make_offer, resolve_speculation
from lorikeet.router.text.tokenizer import Tokenizer
from lorikeet.router.usage.reporter import Usage


@dataclass
class Timing:
    """When a request passed the stations before the queue."""

    arrived_at: float
    validated_at: float = 0.0


@dataclass(frozen=True)
class Service:
    """The parts, made once per process."""

    dispatcher: Dispatcher
    tokenizer: Tokenizer
    config: RouterConfig
    metrics: Metrics
    selection: Selection
    templates: Templates
    preloader: AdapterPreloader | None
    """None where the base model is served alone."""
    reloading: Reloading
    receipts: Receipts
    usage: Usage

    @property
    def admission(self) -> Admission:
        """Of requests with adapters, where those are served."""
        assert self.dispatcher.admission is not None
        return self.dispatcher.admission

    @property
    def rights(self) -> Rights:
        """Of callers to adapters, where those are served."""
        assert self.selection.rights is not None
        return self.selection.rights

    @property
    def offer(self) -> Offer:
        """How far ahead the server can guess."""
        info = self.dispatcher.info
        return make_offer(self.config, "" if info is None else info.draft_model_id)

    @property
    def settled(self) -> bool:
        """Whether the operator's adapters were looked at."""
        return self.preloader is None or self.preloader.settled.is_set()

    def caller(self, request: Request) -> Caller:
        """Who sent `request`."""
        return caller(request, self.selection.keys)

    async def adapter(self, caller: Caller, fields: AdapterFields) -> Adapter | None:
        """The adapter that the caller asks for; None is the bare base model. Raises RouterError."""
        return await self.selection.choose(fields, caller)

    async def heads(self, caller: Caller, fields: AdapterFields, speculation: Speculation) -> Heads | None:
        """Whose heads guess beside the request's adapter, where heads may guess at all. Raises RouterError."""
        if not fields.name and not speculation.num_heads:
            return None
        heads = await self.selection.choose_heads(fields, caller)
        return heads if speculation.num_heads else None

    def speculation(self, wanted: SpeculationFields, *, is_seeded: bool) -> Speculation:
        """How far ahead is guessed for a request. Raises ValidationError."""
        return resolve_speculation(wanted, self.offer, is_seeded=is_seeded)

    def check_room(self) -> None:
        """Before anything is tokenized for a request that would be refused anyway. Raises a leaf of Refused."""
        self.dispatcher.check_room(self.tokenizer.num_pending)

    def check_ids(self, ids: list[int], field: str) -> None:
        """Whether all of a prompt's ids are in the vocabulary. Raises ValidationError."""
        info = self.dispatcher.info
        if info is not None and max(ids) >= info.vocab_size:
            raise ValidationError(f"`{field}` has a token id that is not below {info.vocab_size}", field)

    def validated(self, timing: Timing) -> None:
        """The request is checked and tokenized."""
        timing.validated_at = now()
        self.metrics.request_validated(timing.validated_at - timing.arrived_at)

    def submit(self, request: Request, wanted: list[GenerationRequest], arrived_at: float) -> list[Generation]:
        """Queue all that is wanted for `request` or nothing. Raises a leaf of Refused."""
        limit = self.config.request_timeout_s
        deadline = None if limit is None else arrived_at + limit
        generations: list[Generation] = []
        request.state.wanted, request.state.generations = wanted, generations
        try:
            for each in wanted:
                self.receipts.prepare(each)
                generations.append(generation := self.dispatcher.submit(each, deadline=deadline))
                if self.config.log_texts:
                    generation.read_texts = []
        except BaseException:
            cancel_all(generations)
            raise
        return generations

    async def submit_named(self, request: Request, wanted: GenerationRequest, arrived_at: float) -> Generation:
        """Queue what is wanted, and wait until it is known what its adapter holds. Raises RouterError."""
        [generation] = self.submit(request, [wanted], arrived_at)
        await named([generation])
        return generation


def make_service(dispatcher: Dispatcher, tokenizer: Tokenizer, config: RouterConfig, metrics: Metrics) -> Service:
    """All parts over one dispatcher. Raises OSError or ValueError where an operator's file or URL cannot be used."""
    sources = None if config.loader_address is None else Sources(config.sources)
    rights = None if sources is None else Rights(sources, config.auth_cache_ttl_s, config.auth_stale_s)
    directory = Directory(config, read_catalogue(config))
    selection = Selection(config, rights, directory, read_keys(config))
    preloader = None if dispatcher.admission is None else AdapterPreloader(selection, dispatcher.admission)
    receipts = Receipts(config, tokenizer.digest, dispatcher.links)
    dispatcher.on_complete = receipts.finished
    return Service(
        dispatcher,
        tokenizer,
        config,
        metrics,
        selection,
        Templates(tokenizer, sources),
        preloader,
        Reloading(config, selection, preloader),
        receipts,
        Usage(config, metrics, lambda request: caller(request, selection.keys)),
    )


async def named(generations: list[Generation]) -> None:
    """Wait until it is known what their adapter holds. When that fails all are ended."""
    try:
        for generation in generations:
            await generation.named()
    except BaseException:
        cancel_all(generations)
        raise


def cancel_all(generations: list[Generation]) -> None:
    """End what still runs; a finished generation does not mind."""
    for generation in generations:
        generation.cancel()


def now() -> float:
    """The clock of deadlines and timings."""
    return time.monotonic()


def told(request: GenerationRequest, num_generated: int, finish: FinishReason) -> dict[str, int | str]:
    """What the log says of a request that was answered: numbers only."""
    return {
        "prompt_tokens": len(request.prompt_ids),
        "generated_tokens": num_generated,
        "finish_reason": finish.value,
    }


def random_seed() -> int:
    """For a request that named none. 53 bits survive every JSON reader."""
    return secrets.randbits(53)
