"""`/v1/completions`: one or several prompts, `n` and `best_of` of each, answers and streams in OpenAI's shapes."""

from collections.abc import Iterator, Sequence
from typing import Any

from lorikeet.router.api.answer_parts import Completed, VisibleTokens
from lorikeet.router.api.prepare import Prompt, Prompts, check_ids, text_of
from lorikeet.router.api.routes.native import listed
from lorikeet.router.api.routes.openai import FINISH_REASONS, LOWEST_LOGPROB, OpenAIPrompts, OpenAIRoute
from lorikeet.router.api.service import Service
from lorikeet.router.errors import UnsupportedField, ValidationError
from lorikeet.router.output.events import Event
from lorikeet.router.requests.request import Adapter, Alternatives, Caller, OutputChunk, OutputToken, PromptScores
from lorikeet.router.schemas.openai import CompletionFields, CompletionRequest
from lorikeet.router.text.tokenizer import Tokenizer

Logprobs = dict[str, list[Any] | None]
"""Four lists with an entry per token."""


class CompletionPrompts(OpenAIPrompts):
    """Texts and token ids."""

    def __init__(self, service: Service, params: CompletionFields, caller: Caller) -> None:
        super().__init__(service, params, caller)
        self._completion = params

    async def tokenize(self, adapter: Adapter | None, tokenizer: Tokenizer) -> list[Prompt]:
        return [await self._prompt(written, tokenizer) for written in self._completion.prompts]

    async def _prompt(self, written: str | list[int], tokenizer: Tokenizer) -> Prompt:
        params = self._completion
        if isinstance(written, str):
            text = self._with_suffix(written, params.suffix)
            ids = await self._tokenized(text, "prompt", tokenizer)
            if not ids:
                raise ValidationError("`prompt` cannot be empty", "prompt")
            if params.prompt.num_kept is None or not params.echo:
                return Prompt(ids, text)
        else:
            check_ids(self._service, written, "prompt", tokenizer)
            ids = written
        return Prompt(ids, text_of(tokenizer, ids) if params.echo else "")

    def _with_suffix(self, text: str, suffix: str) -> str:
        """Raises UnsupportedField where the model cannot fill in."""
        if not suffix:
            return text
        tokens = self._service.tokenizer.fill_in_middle
        if tokens is None:
            raise UnsupportedField("suffix", "is not supported by this model: it has no fill-in-the-middle tokens")
        return tokens.prompt(text, suffix)


class CompletionsRoute(OpenAIRoute[CompletionFields]):
    """Prompts as text or token ids, which may be echoed with their log probabilities."""

    id_prefix = "cmpl-"
    object_name = chunk_name = "text_completion"

    def _read(self, body: dict[str, Any], caller: Caller) -> CompletionFields:
        config = self._service.config
        return CompletionRequest.read(self._service.openai_defaults(caller, body), config).to_request(config)

    def _prompts(self, params: CompletionFields, caller: Caller) -> Prompts:
        return CompletionPrompts(self._service, params, caller)

    def _choice(self, params: CompletionFields, prompt: Prompt, whole: Completed) -> dict[str, Any]:
        echoed = prompt.text if params.echo else ""
        tokens, text = ([], "") if params.only_prompt else (whole.tokens, whole.text)
        logprobs: Logprobs | None = None
        if params.num_logprobs is not None:
            shown = VisibleTokens(echoed).take(tokens, text, whole.finish_reason)
            logprobs = self._logprobs(shown, params)
            if params.echo and whole.prefill is not None:
                of_prompt = self._prompt_logprobs(echoed, whole.prefill, params)
                logprobs = _joined(of_prompt, logprobs)
        finish = "length" if params.only_prompt else FINISH_REASONS[whole.finish_reason]
        prompt_ids = {"prompt_token_ids": prompt.ids} if params.report.token_ids else {}
        return {
            "index": 0,
            "text": echoed + text,
            "logprobs": logprobs,
            "finish_reason": finish,
            "stop_reason": None if params.only_prompt else whole.stop_reason,
            **prompt_ids,
            **listed(params.report, params.num_logprobs, tokens),
            **self._prompt_logprobs_of(params, whole),
        }

    def _chunk_choices(
        self, params: CompletionFields, index: int, chunk: OutputChunk, visible: VisibleTokens, events: list[Event]
    ) -> Iterator[dict[str, Any]]:
        logprobs: Logprobs | None = None
        if params.num_logprobs is not None:
            shown = visible.take(chunk.tokens, chunk.text, chunk.finish_reason)
            if shown:
                logprobs = self._logprobs(shown, params)
            if params.echo and chunk.prefill is not None:
                of_prompt = self._prompt_logprobs(visible.echo, chunk.prefill, params)
                logprobs = of_prompt if logprobs is None else _joined(of_prompt, logprobs)
        text, visible.echo = visible.echo + chunk.text, ""
        finish = FINISH_REASONS[chunk.finish_reason]
        more: dict[str, Any] = {"stop_reason": chunk.stop_reason} if finish else {}
        more |= listed(params.report, params.num_logprobs, chunk.tokens)
        if visible.prompt_ids is not None:
            more["prompt_token_ids"], visible.prompt_ids = visible.prompt_ids, None
        if text or logprobs or finish or more.get("token_ids") or more.get("tokens"):
            yield self._text_choice(text) | {"index": index, "logprobs": logprobs, "finish_reason": finish} | more

    def _text_choice(self, text: str) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": None}

    def _logprobs(self, tokens: list[tuple[OutputToken, int]], params: CompletionFields) -> Logprobs:
        """`logprobs` of a choice, for its visible tokens."""
        as_ids = params.report.tokens_as_ids
        shown = [self._shown(token.id, token.logprob, token.alternatives, as_ids) for token, _ in tokens]
        return {
            "tokens": [label for label, _ in shown],
            "token_logprobs": [_bounded(token.logprob) for token, _ in tokens],
            "top_logprobs": [top for _, top in shown] if params.lists_alternatives else None,
            "text_offset": [offset for _, offset in tokens],
        }

    def _prompt_logprobs(self, prompt: str, scores: PromptScores, params: CompletionFields) -> Logprobs:
        """`logprobs` of an echoed prompt; its first token has no probability."""
        as_ids, count = params.report.tokens_as_ids, params.num_logprobs
        shown = [
            self._shown(token_id, logprob, best.first(count or 0), as_ids)
            for (token_id, _, logprob), best in zip(scores.tokens(), scores.alternatives(), strict=True)
        ]
        return {
            "tokens": [label for label, _ in shown],
            "token_logprobs": [logprob for _, _, logprob in scores.tokens()],
            "top_logprobs": [None, *(top for _, top in shown[1:])] if params.lists_alternatives else None,
            "text_offset": self._prompt_offsets(prompt, scores.ids),
        }

    def _prompt_offsets(self, prompt: str, ids: Sequence[int]) -> list[int]:
        """Where the text of each token begins in the prompt; special tokens have none."""
        tokenizer = self._service.tokenizer
        detokenizer, hidden_ids = tokenizer.detokenizer(()), tokenizer.special_ids
        offsets, texts = list[int](), list[str]()
        offset = 0
        for token_id in ids:
            if token_id in hidden_ids:
                offsets.append(offset)
                continue
            texts.append(detokenizer.push(token_id))
            offsets.append(offset + detokenizer.num_earlier)
            offset += len(texts[-1])
        decoded = "".join(texts) + detokenizer.flush()
        # some tokenizers put a space before the text
        surplus = len(decoded) - len(prompt) if decoded.endswith(prompt) else 0
        return [max(0, offset - surplus) for offset in offsets]

    def _shown(
        self, token_id: int, logprob: float | None, alternatives: Alternatives | None, as_ids: bool = False
    ) -> tuple[str, dict[str, float]]:
        """The token's label, and log probabilities by label, the likeliest first.

        If two tokens have the same text, the less likely one is labelled by its bytes, and left out if these are equal.
        """
        vocabulary = self._service.tokenizer.vocabulary
        label_of = _id_label if as_ids else vocabulary.label
        if logprob is None or not alternatives:
            return label_of(token_id), {}
        chances = {other: value for other, _, value in alternatives}
        chances.setdefault(token_id, logprob)
        top: dict[str, float] = {}
        own = ""
        for other in sorted(chances, key=lambda other_id: -chances[other_id]):
            label = label_of(other)
            if label in top:
                label = vocabulary.bytes_label(other)
            top.setdefault(label, _bounded(chances[other]))
            own = label if other == token_id else own
        return own, top


def _id_label(token_id: int) -> str:
    return f"token_id:{token_id}"


def _bounded(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _joined(first: Logprobs, second: Logprobs) -> Logprobs:
    """The lists of `first` followed by those of `second`."""
    joined: Logprobs = {}
    for name, values in first.items():
        more = second[name]
        joined[name] = None if values is None or more is None else values + more
    return joined
