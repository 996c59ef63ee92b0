"""`/v1/completions`: one or several prompts, `n` and `best_of` of each, answers and streams in OpenAI's shapes."""

from collections.abc import Iterator
from typing import Any

from lorikeet.router.api.collect import Alternatives, Completed
from lorikeet.router.api.routes.openai import FINISH_REASONS, LOWEST_LOGPROB, OpenAIRoute, Prompt, VisibleTokens
from lorikeet.router.errors import ValidationError
from lorikeet.router.requests.adapter_ref import Adapter
from lorikeet.router.requests.caller import Caller
from lorikeet.router.requests.types import Chunk, Token
from lorikeet.router.schemas.openai import CompletionRequest, read_completion

Logprobs = dict[str, list[Any] | None]
"""Four lists with an entry per token."""


class CompletionsRoute(OpenAIRoute[CompletionRequest]):
    """Prompts as text or token ids, which may be echoed with their log probabilities."""

    id_prefix = "cmpl"
    object_name = chunk_name = "text_completion"

    def _read(self, body: dict[str, Any]) -> CompletionRequest:
        return read_completion(body, self._service.config)

    async def _prompts(self, wanted: CompletionRequest, caller: Caller) -> tuple[list[Prompt], Adapter | None]:
        prompts = [await self._prompt(given, wanted.echo) for given in wanted.prompts]
        return prompts, await self._service.adapter(caller, wanted.common.adapter)

    async def _prompt(self, given: str | list[int], echo: bool) -> Prompt:
        if isinstance(given, str):
            ids = await self._service.tokenizer.encode(given)
            if not ids:
                raise ValidationError("`prompt` cannot be empty", "prompt")
            return Prompt(ids, given)
        self._service.check_ids(given, "prompt")
        return Prompt(given, self._decode(given) if echo else "")

    def _choice(self, wanted: CompletionRequest, prompt: Prompt, whole: Completed) -> dict[str, Any]:
        echoed = prompt.text if wanted.echo else ""
        tokens, text = ([], "") if wanted.only_prompt else (whole.tokens, whole.text)
        logprobs: Logprobs | None = None
        if wanted.num_logprobs is not None:
            shown = VisibleTokens(self._service, echoed).take(tokens, text, whole.finish_reason)
            logprobs = self._logprobs(shown, wanted.num_logprobs)
            if wanted.echo:
                logprobs = _joined(self._prompt_logprobs(whole.prefill, whole.prefill_alternatives), logprobs)
        finish = "length" if wanted.only_prompt else FINISH_REASONS[whole.finish_reason]
        return {"index": 0, "text": echoed + text, "logprobs": logprobs, "finish_reason": finish}

    def _chunk_choices(
        self, wanted: CompletionRequest, index: int, chunk: Chunk, visible: VisibleTokens
    ) -> Iterator[dict[str, Any]]:
        logprobs: Logprobs | None = None
        if wanted.num_logprobs is not None:
            shown = visible.take(chunk.tokens, chunk.text, chunk.finish_reason)
            if shown:
                logprobs = self._logprobs(shown, wanted.num_logprobs)
            if chunk.prefill is not None:
                prompt = self._prompt_logprobs(chunk.prefill, chunk.prefill_alternatives)
                logprobs = prompt if logprobs is None else _joined(prompt, logprobs)
        text, visible.echo = visible.echo + chunk.text, ""
        finish = FINISH_REASONS[chunk.finish_reason]
        if text or logprobs or finish:
            yield {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, tokens: list[tuple[Token, int]], num_alternatives: int) -> Logprobs:
        """`logprobs` of a choice, for its visible tokens."""
        text = self._service.tokenizer.token_text
        top: list[Any] | None = None
        if num_alternatives:
            top = []
            for token, _ in tokens:
                best = {other_text: max(value, LOWEST_LOGPROB) for _, other_text, value in token.alternatives or ()}
                top.append({**best, text(token.id): max(token.logprob, LOWEST_LOGPROB)})
        return {
            "tokens": [text(token.id) for token, _ in tokens],
            "token_logprobs": [max(token.logprob, LOWEST_LOGPROB) for token, _ in tokens],
            "top_logprobs": top,
            "text_offset": [offset for _, offset in tokens],
        }

    def _prompt_logprobs(
        self, prefill: list[tuple[int, str, float | None]], alternatives: list[Alternatives] | None
    ) -> Logprobs:
        """The same four lists for an echoed prompt; its first token has no probability."""
        hidden_ids = self._service.tokenizer.special_ids
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


def _joined(first: Logprobs, second: Logprobs) -> Logprobs:
    """The lists of `first` followed by those of `second`."""
    joined: Logprobs = {}
    for name, values in first.items():
        more = second[name]
        joined[name] = None if values is None or more is None else values + more
    return joined
