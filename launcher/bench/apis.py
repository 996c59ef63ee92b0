"""The three APIs that are measured: how a request is written, and what an event of its stream says."""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import orjson

from lorikeet.launcher.bench.workload import Planned


@dataclass
class Seen:
    """What the events of one stream have said so far."""

    token_times: list[float] = field(default_factory=list)
    """Arrival times of events with new tokens, in seconds; tokens of one step are one event."""
    num_prompt: int = 0
    num_output: int = 0
    """As the server counts them; 0 while it has not said."""
    num_tokens: int = 0
    """Tokens of LoRAX's events, which have one token each."""
    num_steps: int = 0
    """Tokens that were not drafted and accepted; 0 if the server does not say."""
    sources: Counter[str] = field(default_factory=Counter)
    """Tokens by what proposed them, if the server says so."""
    texts: list[str] = field(default_factory=list)
    error: str = ""
    is_complete: bool = False


class Api(ABC):
    """One of them, for one model."""

    path: str

    def __init__(self, model: str, fields: dict[str, Any], ignores_eos: bool) -> None:
        """`fields` go into every body."""
        self._model = model
        self._fields = fields
        self._ignores_eos = ignores_eos

    @abstractmethod
    def body(self, planned: Planned) -> dict[str, Any]:
        """Body of a request that streams."""

    def read(self, event: bytes, time_s: float, seen: Seen) -> None:
        """Add the data of an event that arrived at `time_s`."""
        if event == b"[DONE]":
            seen.is_complete = True
            return
        data = orjson.loads(event)
        if not isinstance(data, dict):
            raise ValueError(f"{event[:80]!r} is not an event of this API")
        if data.get("error"):
            error = data["error"]
            seen.error = str(error.get("message", error) if isinstance(error, dict) else error)[:500]
        else:
            self._read(data, time_s, seen)

    @abstractmethod
    def _read(self, data: dict[str, Any], time_s: float, seen: Seen) -> None: ...


class Completions(Api):
    """OpenAI's `/v1/completions`. An adapter is a model, as in vLLM and LoRAX."""

    path = "/v1/completions"

    def body(self, planned: Planned) -> dict[str, Any]:
        more = {"ignore_eos": True} if self._ignores_eos else {}
        return {
            "model": planned.adapter or self._model,
            **self._prompt(planned),
            "max_tokens": planned.num_output,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
            **self._fields,
        }

    def _prompt(self, planned: Planned) -> dict[str, Any]:
        return {"prompt": planned.prompt}

    def _read(self, data: dict[str, Any], time_s: float, seen: Seen) -> None:
        for choice in data.get("choices") or ():
            text = self._text(choice)
            if text or (choice.get("finish_reason") is None and self._counts_empty):
                seen.token_times.append(time_s)
                seen.texts.append(text)
        if usage := data.get("usage"):
            seen.num_prompt, seen.num_output = usage["prompt_tokens"], usage.get("completion_tokens", 0)

    _counts_empty = True
    """An event without text may hold a part of a character."""

    def _text(self, choice: dict[str, Any]) -> str:
        return choice.get("text") or ""


class Chat(Completions):
    """OpenAI's `/v1/chat/completions`: the prompt is one message of the user."""

    path = "/v1/chat/completions"
    _counts_empty = False  # the first event has only the role

    def _prompt(self, planned: Planned) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": planned.prompt}]}

    def _text(self, choice: dict[str, Any]) -> str:
        delta = choice.get("delta") or {}
        return delta.get("content") or delta.get("reasoning_content") or ""


class Lorax(Api):
    """LoRAX's `/generate_stream`, which text-generation-inference has too. Lorikeet's events name the source."""

    path = "/generate_stream"

    def body(self, planned: Planned) -> dict[str, Any]:
        parameters: dict[str, Any] = {"max_new_tokens": planned.num_output, "details": True, **self._fields}
        if planned.adapter is not None:
            parameters["adapter_id"] = planned.adapter
        if self._ignores_eos:
            parameters["ignore_eos_token"] = True
        return {"inputs": planned.prompt, "parameters": parameters}

    def _read(self, data: dict[str, Any], time_s: float, seen: Seen) -> None:
        if (token := data.get("token")) is not None:
            seen.num_tokens += 1
            if not token.get("skipped"):
                seen.token_times.append(time_s)
            if (source := token.get("source")) is not None:
                seen.sources[source] += 1
                seen.num_steps += not token["skipped"]
            seen.texts.append(token.get("text") or "")
        if data.get("generated_text") is not None:
            details = data.get("details") or {}
            seen.num_prompt = details.get("prompt_tokens", 0)
            seen.num_output = details.get("generated_tokens", seen.num_tokens)
            seen.is_complete = True


APIS: dict[str, type[Api]] = {"openai": Completions, "openai-chat": Chat, "lorax": Lorax}
