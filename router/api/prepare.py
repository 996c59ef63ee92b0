"""Prepares a request to the model in seven steps: room, tokens, lengths, adapter, speculation, grammar, submission.

All routes to the model call `prepare`. They differ in what their bodies ask for (`RequestFields`), and in how their
prompts become tokens (`Prompts`).
"""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import structlog
from starlette.requests import Request

from lorikeet.proto import pooling
from lorikeet.proto.params import MAX_BAD_WORD_TOKENS, Grammar, SamplingParams, Speculation
from lorikeet.router.api.service import Service
from lorikeet.router.errors import Overloaded, ToolError, UnsupportedField, ValidationError, WrongTask
from lorikeet.router.output.outputs import Prepared
from lorikeet.router.receipts import check_receipt
from lorikeet.router.requests.generation import Generation, Timeline
from lorikeet.router.requests.request import Adapter, Caller, FinishReason, GenerationRequest, Heads
from lorikeet.router.schemas.generation import RequestFields, check_min_tokens, resolve_speculation, takes_history
from lorikeet.router.schemas.grammar import GrammarFields
from lorikeet.router.text.tokenizer import Encoded, Tokenizer, bad_word_ids

log = structlog.get_logger()


@dataclass
class Timing:
    """When a request arrived and was validated."""

    arrived_at: float
    validated_at: float = 0.0


@dataclass(frozen=True)
class Prompt:
    """One tokenized prompt."""

    ids: list[int]
    text: str = ""
    """Empty for a prompt that came as token ids, unless it is echoed."""
    conversation: Prepared | None = None
    """How the output of a conversation is read."""
    ignored: tuple[str, ...] = ()
    """Fields of a conversation that its chat template does not read."""
    encoded: Encoded | None = None
    """The tokens of a text for an embedding or classification model."""


class Prompts(ABC):
    """The prompts of a request, before they are tokenized."""

    needs_adapter: ClassVar[bool] = False
    """Whether the adapter determines the prompt: a conversation is rendered with its adapter's chat template."""

    @abstractmethod
    async def tokenize(self, adapter: Adapter | None, tokenizer: Tokenizer) -> list[Prompt]:
        """`adapter` is None without `needs_adapter`; `tokenizer` is the adapter's. Raises RouterError."""

    def naming_field(self) -> str:
        """The request's field that asks for the texts of single tokens next to those of the output; "" without one."""
        return ""

    @abstractmethod
    def max_tokens(self, num_prompt: int) -> int:
        """Tokens that may be generated after a prompt of so many. Raises ValidationError if it is too long."""


@dataclass(frozen=True)
class PreparedRequest:
    """The sequences of a request."""

    prompts: list[Prompt]
    requests: list[GenerationRequest]
    """Sequences in the order of their prompts."""
    ignored: Sequence[str] = ()
    """Fields that the chat template does not read, and what the grammar leaves out of schemas that are not strict."""
    deadline: float | None = None
    """In seconds of `time.monotonic()`."""
    generations: list[Generation] = field(default_factory=list)
    """Generations of the sequences that are queued: the first ones."""


async def prepare(
    service: Service, request: Request, fields: RequestFields, prompts: Prompts, timing: Timing
) -> PreparedRequest:
    """Check, tokenize, resolve and queue what a body asks for. Raises RouterError."""
    caller = service.caller(request)
    check_room(service, caller)
    if fields.pooling is None:
        check_generates(service)
    # a chat template may be the adapter's; else lengths are checked first, because an adapter may take seconds to load
    needs_adapter = prompts.needs_adapter or service.tokenizers.is_used
    adapter = await service.selection.choose(fields.adapter, caller) if needs_adapter else None
    tokenizer = await service.tokenizers.of(adapter)
    if tokenizer is not service.tokenizer:
        check_added_tokens(fields, prompts)
    tokenized = await prompts.tokenize(adapter, tokenizer)
    max_tokens = [prompts.max_tokens(len(prompt.ids)) for prompt in tokenized]
    check_min_tokens(fields.constraints.min_tokens, 0 if fields.is_probe else min(max_tokens))
    if not needs_adapter:
        adapter = await service.selection.choose(fields.adapter, caller)
    speculation = await _speculation(service, fields, caller, tokenizer)
    check_receipt(fields.receipt, speculation, len(tokenized) * fields.num_sequences)
    shared = await _resolved(service, fields, caller, adapter, speculation, tokenizer)
    shared, left_out = await _with_grammar(service, shared, fields, tokenized[0].conversation)
    requests = _sequences(service, shared, fields, tokenized, max_tokens)
    timing.validated_at = now()
    service.metrics.request_validated(timing.validated_at - timing.arrived_at)
    ignored = [*tokenized[0].ignored, *left_out]
    return submit(service, request, PreparedRequest(tokenized, requests, ignored), timing.arrived_at)


def check_room(service: Service, caller: Caller) -> None:
    """Reject a request before it is tokenized. Raises a subclass of Refused."""
    service.dispatcher.check_room(service.tokenizer.pool.num_pending, caller.identity)


ROUTES_OF = {
    pooling.EMBED: "/v1/embeddings, /embed, /score, /rerank or /pooling",
    pooling.CLASSIFY: "/classify, /score, /rerank or /pooling",
    pooling.TOKEN_CLASSIFY: "/classify, /classify_batch or /pooling",
}
"""By the model's task."""


def check_generates(service: Service) -> None:
    """Raises WrongTask where the model computes vectors or labels."""
    if (model := service.pooled_model) is not None:
        raise WrongTask(
            f"this server's model is of the task {model.task}: it generates no text. Use {ROUTES_OF[model.task]}"
        )


def check_added_tokens(fields: RequestFields, prompts: Prompts) -> None:
    """Raises UnsupportedField for what knows the base's tokens only. The adapter of the request adds some."""
    if field := "receipt" if fields.receipt else prompts.naming_field():
        raise UnsupportedField(field, NOT_WITH_ADDED)


NOT_WITH_ADDED = "is not available with an adapter that adds tokens"


async def _speculation(service: Service, fields: RequestFields, caller: Caller, tokenizer: Tokenizer) -> Speculation:
    """How draft tokens are proposed. Lookup reads the tokens of `prediction`, up to the length of the context."""
    speculation = resolve_speculation(fields.speculation, service.offer, is_seeded=fields.seed is not None)
    prediction = fields.speculation.prediction
    if not prediction or not speculation.num_tokens:
        return speculation
    limit = service.config.max_total_tokens
    least = tokenizer.length.least_tokens([prediction], limit)
    if least > limit:
        raise ValidationError(
            f"`prediction` may have as many tokens as the context, {limit}. Given: at least {least}", "prediction"
        )
    ids = await tokenizer.encode(prediction, add_special_tokens=False, caller=caller.identity)
    return replace(speculation, prediction_ids=tuple(ids[:limit]))


async def _resolved(
    service: Service,
    fields: RequestFields,
    caller: Caller,
    adapter: Adapter | None,
    speculation: Speculation,
    tokenizer: Tokenizer,
) -> GenerationRequest:
    """What all sequences of a request have in common; prompts, lengths and seeds are their own."""
    constraints = fields.constraints
    return GenerationRequest(
        prompt_ids=[],
        max_new_tokens=0,
        sampling=await _sampling(service, fields, caller.identity, tokenizer),
        tokenizer=None if tokenizer is service.tokenizer else tokenizer,
        logprobs=fields.logprobs,
        stop_strings=fields.stop,
        include_stop=fields.include_stop if constraints.include_stop is None else constraints.include_stop,
        include_stop_token=bool(constraints.include_stop),
        ignore_eos=constraints.ignore_eos,
        stop_token_ids=constraints.stop_token_ids,
        bad_words=constraints.bad_words,
        skip_special_tokens=constraints.skip_special_tokens,
        caller=caller.identity,
        share=caller.share,
        cache_salt=caller.cache_salt(fields.cache_salt),
        tenant=_tenant(service, fields, caller, speculation),
        learning_tenant=_learning_tenant(service, fields, caller, adapter, speculation),
        adapter=adapter,
        heads=await _heads(service, fields, caller, speculation),
        speculation=speculation,
        needs_heads=fields.speculation.needs_heads,
        pooling=fields.pooling,
        request_id=caller.request_id,
        priority=fields.priority,
        receipt=fields.receipt,
        is_probe=fields.is_probe,
    )


async def _heads(service: Service, fields: RequestFields, caller: Caller, speculation: Speculation) -> Heads | None:
    """The Medusa heads used with the request's adapter; None if it uses none."""
    if fields.heads is None or (not fields.heads.name and not speculation.num_heads):
        return None
    heads = await service.selection.choose_heads(fields.heads, caller)
    return heads if speculation.num_heads else None


def _tenant(service: Service, fields: RequestFields, caller: Caller, speculation: Speculation) -> str:
    """Whose outputs are proposed as drafts to a request; empty for none. Raises UnsupportedField."""
    is_wanted = takes_history(fields.speculation, service.offer, speculation)
    tenant = caller.tenant(fields.cache_salt) if is_wanted else ""
    if fields.speculation.history and not tenant:
        raise UnsupportedField("speculative_history", "is not available to an API key that is marked `isolate`")
    return tenant


def _learning_tenant(
    service: Service, fields: RequestFields, caller: Caller, adapter: Adapter | None, speculation: Speculation
) -> str:
    """Whose outputs heads are learned from that draft for a request; empty for none, or if it names heads."""
    entry = service.selection.directory.find(adapter.alias) if adapter is not None and adapter.alias else None
    of_alias = None if entry is None else entry.learn_heads
    is_wanted = service.config.learn_heads if of_alias is None else of_alias
    info = service.dispatcher.info
    if info is None or not is_wanted or not speculation.num_heads or fields.heads is None or fields.heads.name:
        return ""
    if info.learning:
        return caller.tenant(fields.cache_salt)
    if entry is not None and of_alias and entry.alias not in service.not_learning:
        service.not_learning.add(entry.alias)
        log.warning("learn_heads_unavailable", alias=entry.alias, reason="the shards cannot learn: see their logs")
    return ""


async def _with_grammar(
    service: Service, request: GenerationRequest, fields: RequestFields, conversation: Prepared | None
) -> tuple[GenerationRequest, Sequence[str]]:
    """With what the output follows, and the paths of what is left out of schemas that are not strict."""
    if conversation is None:
        return await _following(service, request, fields, fields.grammar), ()
    request = replace(request, shown_ids=conversation.shown_ids, reasoning=conversation.reasoning)
    try:
        return await _following(service, request, fields, conversation.grammar), conversation.left_out
    except ValidationError as error:
        if conversation.grammar is None or conversation.grammar.field != "tools":
            raise
        if conversation.looser is None:
            raise ToolError(error.message, error.param) from None
        return await _with_grammar(service, request, fields, conversation.looser())


async def _following(
    service: Service, request: GenerationRequest, fields: RequestFields, grammar: GrammarFields | None
) -> GenerationRequest:
    """With a grammar as shards take it. Raises ValidationError or UnsupportedField."""
    if grammar is None:
        return request
    if (masks := fields.constraints.masks) is not None:
        raise ValidationError(f"`{masks}` and `{grammar.field}` cannot be set together: no token might be left", masks)
    if request.tokenizer is not None:
        raise UnsupportedField(grammar.field, NOT_WITH_ADDED)
    info = service.dispatcher.info
    if info is not None and not info.grammars:
        raise UnsupportedField(grammar.field, "needs a model with a fast tokenizer (tokenizer.json)")
    text = await service.grammars.serialize(grammar.kind, grammar.value, grammar.field, request.caller)
    followed = Grammar(text, proposes=fields.speculation.num_tokens != 0)
    return replace(request, grammar=followed, grammar_kind=grammar.kind, grammar_value=grammar.value)


def check_ids(service: Service, ids: Sequence[int], field: str, tokenizer: Tokenizer) -> None:
    """Raises ValidationError if one of the ids is not in the vocabulary of the model, or of the adapter."""
    if not ids or (info := service.dispatcher.info) is None:
        return
    size = info.vocab_size if tokenizer is service.tokenizer else max(info.vocab_size, tokenizer.vocabulary.size)
    if max(ids) >= size:
        raise ValidationError(f"`{field}` has a token id that is not below {size}", field)


async def _sampling(service: Service, fields: RequestFields, caller: str, tokenizer: Tokenizer) -> SamplingParams:
    """With what the client asks for of the output's tokens. Raises ValidationError."""
    constraints, biased = fields.constraints, [token_id for token_id, _ in fields.sampling.logit_bias]
    check_ids(service, fields.logprobs.alternative_ids, "logprob_token_ids", tokenizer)
    check_ids(service, constraints.stop_token_ids, "stop_token_ids", tokenizer)
    check_ids(service, constraints.allowed_token_ids, "allowed_token_ids", tokenizer)
    check_ids(service, biased, "logit_bias", tokenizer)
    if constraints.masks is None:
        return fields.sampling
    _check_masks(service, constraints.masks)
    words = await bad_word_ids(tokenizer, constraints.bad_words, caller)
    if any(len(word) > MAX_BAD_WORD_TOKENS for word in words):
        raise ValidationError(f"a word of `bad_words` may have up to {MAX_BAD_WORD_TOKENS} tokens", "bad_words")
    # those of the model even if `ignore_eos` is set
    end_ids = tokenizer.eos_ids.union(constraints.stop_token_ids) if constraints.min_tokens else frozenset[int]()
    sampling = replace(
        fields.sampling,
        allowed_ids=constraints.allowed_token_ids,
        bad_words=words,
        min_tokens=constraints.min_tokens,
        min_tokens_stop_ids=tuple(sorted(end_ids)),
    )
    if sampling.excludes_all(end_ids):
        names = " and ".join(f"`{name}`" for name in ("bad_words", "min_tokens") if getattr(constraints, name))
        raise ValidationError(f"`allowed_token_ids` leaves no token next to {names}", "allowed_token_ids")
    return sampling


def _check_masks(service: Service, field: str) -> None:
    """Raises UnsupportedField while a shard is connected that does not apply masks."""
    for link in service.dispatcher.links:
        if link.info is not None and not link.info.token_masks:
            raise UnsupportedField(field, f"needs shards of version 0.2: one has version {link.info.version}")


def _sequences(
    service: Service, shared: GenerationRequest, fields: RequestFields, prompts: list[Prompt], max_tokens: list[int]
) -> list[GenerationRequest]:
    """`num_sequences` of each prompt, in the order of the prompts. Those of a prompt share its KV, not the seed."""
    requests = list[GenerationRequest]()
    for index, (prompt, limit) in enumerate(zip(prompts, max_tokens, strict=True)):
        own = shared.tokenizer or service.tokenizer
        text = prompt.text or (text_of(own, prompt.ids) if service.config.log_texts else "")
        request_id = f"{shared.request_id}/{index}" if len(prompts) > 1 else shared.request_id
        pooling = shared.pooling
        if pooling is not None and prompt.encoded is not None:
            pooling = replace(pooling, second_text=prompt.encoded.second_text)
        for number in range(fields.num_sequences):
            seed = random_seed() if fields.seed is None else (fields.seed + number) % 2**64
            requests.append(
                replace(  # once: the class has many fields
                    shared,
                    prompt_ids=prompt.ids,
                    text=text,
                    max_new_tokens=limit,
                    request_id=request_id,
                    pooling=pooling,
                    sampling=replace(shared.sampling, seed=seed),
                )
            )
    return requests


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of a prompt that came as token ids, without special tokens."""
    detokenizer, hidden_ids = tokenizer.detokenizer(()), tokenizer.special_ids
    return "".join(detokenizer.push(token_id) for token_id in ids if token_id not in hidden_ids) + detokenizer.flush()


def submit(service: Service, request: Request, prepared: PreparedRequest, arrived_at: float) -> PreparedRequest:
    """Queue the first `max_sequences` sequences of `request`, or none, and give all of them one deadline.

    Of requests for vectors only some may be queued: `submit_more` queues the others. Raises a subclass of Refused.
    """
    if (charge := request.scope["state"].get("body_charge")) is not None:
        charge.settle()
    request.scope["state"] |= {"requests": prepared.requests, "generations": prepared.generations}
    if (limit := service.config.request_timeout_s) is not None:
        prepared = replace(prepared, deadline=arrived_at + limit)
    submit_more(service, request, prepared)
    return prepared


def submit_more(service: Service, request: Request, prepared: PreparedRequest, num_done: int = 0) -> None:
    """Queue further sequences, so that up to `max_sequences` of them run besides the `num_done` first ones."""
    requests, generations = prepared.requests, prepared.generations
    try:
        while len(generations) < min(len(requests), num_done + service.config.max_sequences):
            generations.append(_queued(service, request, requests[len(generations)], prepared.deadline))
    except BaseException as error:
        runs = len(generations) > num_done
        if isinstance(error, Overloaded) and requests[0].pooling is not None and runs:
            return  # those that run will make room
        cancel_all(generations)
        raise


def _queued(service: Service, request: Request, sequence: GenerationRequest, deadline: float | None) -> Generation:
    service.receipts.prepare(sequence)
    timeline = None if request.scope["state"].get("trace") is None else Timeline()
    generation = service.dispatcher.submit(sequence, deadline=deadline, timeline=timeline)
    if service.config.log_texts:
        generation.read_texts = []
    return generation


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
    """For a request without one. It cannot be computed from those of other requests, which answers show. 53 bits
    survive every JSON reader.
    """
    return secrets.randbits(53)
