"""What answers of OpenAI's routes say about a request as a whole: usage, speculation, the client's own metadata."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lorikeet.router.api.collect import speculation_metrics, speculation_report
from lorikeet.router.requests.generation import Generation
from lorikeet.router.schemas.openai import OpenAIRequest
from lorikeet.router.text.tokenizer import Tokenizer


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
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **({} if usage is None else {"usage": usage}),
            "system_fingerprint": self.system_fingerprint,
        }


def token_counts(num_prompt: int, num_completion: int) -> dict[str, int]:
    """In LoRAX's order."""
    total = num_prompt + num_completion
    return {"prompt_tokens": num_prompt, "total_tokens": total, "completion_tokens": num_completion}


async def count_reasoning(tokenizer: Tokenizer, texts: Sequence[str], generations: Sequence[Generation]) -> int:
    """Tokens of the reasoning in all outputs, counted apart from the rest; notes those of each generation."""
    ids = await tokenizer.encode_each(list(texts)) if any(texts) else []
    for generation, each in zip(generations, ids, strict=False):
        generation.num_reasoning = len(each)
    return sum(map(len, ids))


def usage(
    wanted: OpenAIRequest, num_prompt: int, generations: Sequence[Generation], num_reasoning: int = 0
) -> dict[str, Any]:
    """LoRAX's keys first, in its order; speculative decoding's counts are where OpenAI has those of predictions.

    `num_prompt` and `num_reasoning` are tokens of all prompts, and of the reasoning in all outputs.
    """
    num_completion = 0 if wanted.only_prompt else sum(generation.num_generated for generation in generations)
    num_cached = sum(generation.num_cached for generation in generations[:: wanted.best_of])
    counts: dict[str, Any] = token_counts(num_prompt, num_completion)
    counts["prompt_tokens_details"] = {"cached_tokens": num_cached}
    details: dict[str, Any] = {"reasoning_tokens": num_reasoning} if num_reasoning else {}
    report = speculation_report(generations)
    if report is not None:
        details |= {
            "accepted_prediction_tokens": report["accepted"],
            "rejected_prediction_tokens": report["drafted"] - report["accepted"],
            "speculation": report,
        }
    return counts | ({"completion_tokens_details": details} if details else {})


def metrics(generations: Sequence[Generation]) -> dict[str, Any]:
    """vLLM's `metrics`, of requests with one sequence."""
    found = speculation_metrics(generations[0]) if len(generations) == 1 else None
    return {} if found is None else {"metrics": {"speculative_decoding": found}}


def repeated(wanted: OpenAIRequest) -> dict[str, Any]:
    """What an answer repeats of the request."""
    report = wanted.report
    fields: dict[str, Any] = {} if report.service_tier is None else {"service_tier": "default"}
    return fields if report.metadata is None else fields | {"metadata": report.metadata}
