"""What OpenAI's two generation routes share: requests for a prompt, envelopes, usage, finish reasons, logprobs."""

import secrets
import time
from dataclasses import dataclass, replace
from typing import Any

from lorikeet.router.api.routes.speculated import speculation_report
from lorikeet.router.api.service import Service, random_seed
from lorikeet.router.requests.adapter_ref import Adapter, Heads
from lorikeet.router.requests.caller import Caller
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.types import NO_SPECULATION, FinishReason, GenerationRequest, Speculation, Token
from lorikeet.router.schemas.openai import CommonFields, check_lengths

FINISH_REASONS = {FinishReason.LENGTH: "length", FinishReason.EOS_TOKEN: "stop", FinishReason.STOP_SEQUENCE: "stop"}

_LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON can't say."""


@dataclass(frozen=True)
class LogprobsWanted:
    """Alternatives per token, None for no logprobs; `prompt` asks for those of the prompt too."""

    num_alternatives: int | None = None
    prompt: bool = False


@dataclass(frozen=True)
class Prompt:
    """One prompt, as text only where the text was given or is to be echoed."""

    ids: list[int]
    text: str


@dataclass(frozen=True)
class Group:
    """What the sequences of one prompt share beside it."""

    id: str
    adapter: Adapter | None
    cache_salt: str = ""
    speculation: Speculation = NO_SPECULATION
    heads: Heads | None = None


def requests_for(
    service: Service,
    common: CommonFields,
    prompt: Prompt,
    num_sequences: int,
    logprobs: LogprobsWanted,
    group: Group,
) -> list[GenerationRequest]:
    """The sequences of one prompt: they share its computation and differ in their seed."""
    count = logprobs.num_alternatives or 0
    # Scoring a prompt needs a step like any other: its one token is dropped.
    max_tokens = 1 if common.max_tokens == 0 else common.max_tokens
    first = GenerationRequest(
        prompt_ids=prompt.ids,
        text=prompt.text or (decoded(service, prompt.ids) if service.config.log_texts else ""),
        max_new_tokens=check_lengths(len(prompt.ids), max_tokens, service.config),
        seed=random_seed() if common.seed is None else common.seed,
        sampling=common.sampling,
        stop_strings=common.stop,
        include_stop=False,
        ignore_eos=common.ignore_eos,
        num_alternatives=count,
        prefill_logprobs=logprobs.prompt and logprobs.num_alternatives is not None,
        num_prefill_alternatives=count if logprobs.prompt else 0,
        raw_logprobs=True,
        request_id=group.id,
        adapter=group.adapter,
        cache_salt=group.cache_salt,
        speculation=group.speculation,
        heads=group.heads,
        receipt=common.receipt,
        is_probe=common.max_tokens == 0,
    )
    seeds = [random_seed() if common.seed is None else (common.seed + index) % 2**64 for index in range(num_sequences)]
    return [replace(first, seed=seed) for seed in seeds]


def decoded(service: Service, ids: list[int]) -> str:
    """The text of a prompt that came as token ids."""
    detokenizer = service.tokenizer.detokenizer(())
    hidden_ids = service.tokenizer.special_ids
    shown = "".join(detokenizer.push(token_id) for token_id in ids if token_id not in hidden_ids)
    return shown + detokenizer.flush()


@dataclass(frozen=True)
class Envelope:
    """What an answer and all chunks of a stream have in common."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str

    def around(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """LoRAX's order of keys."""
        whole: dict[str, Any] = {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if usage is not None:
            whole["usage"] = usage
        whole["system_fingerprint"] = self.system_fingerprint
        return whole


def envelope(service: Service, prefix: str, kind: str, common: CommonFields) -> Envelope:
    """A new one, with an id of its own."""
    info = service.dispatcher.info
    fingerprint = f"{info.version}-{info.dtype.removeprefix('torch.')}-{info.device}" if info is not None else "unknown"
    model = common.adapter.name or service.config.model_id
    return Envelope(f"{prefix}-{secrets.token_hex(16)}", kind, int(time.time()), model, fingerprint)


async def group_of(service: Service, caller: Caller, common: CommonFields, adapter: Adapter | None) -> Group:
    """What all sequences of one request share. Raises RouterError."""
    guessing = await _speculation(service, common)
    heads = await service.heads(caller, common.heads, guessing)
    return Group(caller.request_id, adapter, caller.cache_salt, guessing, heads)


async def _speculation(service: Service, common: CommonFields) -> Speculation:
    """How far ahead is guessed, with the tokens of the text that the output may repeat, as far as it is looked at."""
    settled = service.speculation(common.speculation, is_seeded=common.seed is not None)
    prediction = common.speculation.prediction
    if not prediction or not settled.num_tokens:
        return settled
    ids = await service.tokenizer.encode(prediction, add_special_tokens=False)
    return replace(settled, prediction_ids=tuple(ids[: service.config.max_total_tokens]))


async def receipt_of(service: Service, generations: list[Generation]) -> dict[str, Any]:
    """What stands beside the choices where the request wants a receipt. Raises GenerationFailed."""
    if not generations[0].request.receipt:
        return {}
    return {"receipt": await service.receipts.of(generations[0])}


def usage(num_prompt: int, num_cached: int, num_completion: int, generations: list[Generation]) -> dict[str, Any]:
    """LoRAX's keys first, in its order. What guessing ahead gave stands where OpenAI tells of predictions."""
    told: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_completion,
        "completion_tokens": num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
    report = speculation_report(generations)
    if report is not None:
        told["completion_tokens_details"] = {
            "accepted_prediction_tokens": report["accepted"],
            "rejected_prediction_tokens": report["drafted"] - report["accepted"],
            "speculation": report,
        }
    return told


def chat_logprobs(service: Service, tokens: list[Token]) -> dict[str, Any]:
    """`logprobs` of a chat choice, for its visible tokens."""
    content = []
    for token in tokens:
        entry = _chat_entry(service, token.id, token.logprob)
        entry["top_logprobs"] = [_chat_entry(service, other, value) for other, _, value in token.alternatives or ()]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_entry(service: Service, token_id: int, logprob: float) -> dict[str, Any]:
    vocabulary = service.tokenizer.vocabulary
    text = service.tokenizer.token_text(token_id)
    raw = vocabulary.piece(token_id) if vocabulary.is_bytewise else text.encode()
    return {"token": text, "logprob": max(logprob, _LOWEST_LOGPROB), "bytes": list(raw)}


class VisibleTokens:
    """Tells which tokens of a choice its text shows: neither an end-of-text token nor what a stop string cut off."""

    def __init__(self, service: Service, start: int = 0) -> None:
        self._hidden_ids = service.tokenizer.special_ids | service.tokenizer.eos_ids
        self._offset = start
        """Characters of the text before the next token."""
        self._text_length = start

    def take(self, tokens: list[Token], text: str, finish: FinishReason | None) -> list[tuple[Token, int]]:
        """(token, offset of its text) of one chunk with its visible text."""
        self._text_length += len(text)
        shown = []
        for token in tokens:
            if token.id in self._hidden_ids:
                continue
            if finish is FinishReason.STOP_SEQUENCE and self._offset >= self._text_length:
                break
            shown.append((token, self._offset))
            self._offset += len(token.text)
        return shown


def completion_logprobs(
    service: Service, tokens: list[tuple[Token, int]], num_alternatives: int
) -> dict[str, list[Any] | None]:
    """`logprobs` of a completion choice: four lists in step."""
    text = service.tokenizer.token_text
    top: list[Any] | None = None
    if num_alternatives:
        top = []
        for token, _ in tokens:
            best = {other_text: max(value, _LOWEST_LOGPROB) for _, other_text, value in token.alternatives or ()}
            top.append({**best, text(token.id): max(token.logprob, _LOWEST_LOGPROB)})
    return {
        "tokens": [text(token.id) for token, _ in tokens],
        "token_logprobs": [max(token.logprob, _LOWEST_LOGPROB) for token, _ in tokens],
        "top_logprobs": top,
        "text_offset": [offset for _, offset in tokens],
    }


def prompt_logprobs(
    service: Service,
    prefill: list[tuple[int, str, float | None]],
    alternatives: list[list[tuple[int, str, float]]] | None,
) -> dict[str, list[Any] | None]:
    """The same four lists for an echoed prompt; its first token has no probability."""
    hidden_ids = service.tokenizer.special_ids
    offsets, offset = [], 0
    for token_id, text, _ in prefill:
        offsets.append(offset)
        offset += 0 if token_id in hidden_ids else len(text)
    top: list[Any] | None = None
    if alternatives is not None:
        top = [None] + [
            {**{other: value for _, other, value in best}, text: logprob}
            for (_, text, logprob), best in zip(prefill[1:], alternatives[1:], strict=True)
        ]
    return {
        "tokens": [text for _, text, _ in prefill],
        "token_logprobs": [logprob for _, _, logprob in prefill],
        "top_logprobs": top,
        "text_offset": offsets,
    }
