"""Headers of answers: LoRAX's timings and counts, the request's id, and the names of ignored fields.

Every value that a client chose is made safe here.
"""

import re
import secrets
from dataclasses import dataclass

from lorikeet.router.api.service import Service, Timing, now
from lorikeet.router.requests.generation import Generation

_UNSAFE = re.compile(r"[^\x20-\x7e]")
_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._:-]")

_MAX_IGNORED = 32
_MAX_NAME = 64


def safe(value: str) -> str:
    """`value` as a header may carry it."""
    return _UNSAFE.sub("?", value)


def request_id(given: str | None) -> str:
    """The client's own id without what could break a header or a log line, or a new one."""
    cleaned = _NOT_IN_ID.sub("", given or "")[:128]
    return cleaned or secrets.token_hex(16)


def ignored_fields(names: list[str]) -> dict[str, str]:
    """`x-ignored-fields`, absent when nothing was ignored."""
    if not names:
        return {}
    shown = [safe(name[:_MAX_NAME]).replace(",", "?") for name in names[:_MAX_IGNORED]]
    return {"x-ignored-fields": ", ".join(shown)}


def adapter_headers(generation: Generation | None) -> dict[str, str]:
    """Which adapter answered, by its name, its source and its content; nothing for the base model."""
    adapter = None if generation is None else generation.request.adapter
    if generation is None or adapter is None:
        return {}
    return {
        "x-adapter-id": safe(adapter.name),
        "x-adapter-source": adapter.source,
        "x-adapter-revision": safe(adapter.revision),
        "x-adapter-digest": generation.digest,
    }


def compute_type(service: Service) -> str:
    """LoRAX's `gpu+optimized` where there is a GPU."""
    info = service.dispatcher.info
    return "cpu+optimized" if info is not None and info.device.startswith("cpu") else "gpu+optimized"


@dataclass(frozen=True)
class Counts:
    """What the headers count."""

    characters: int
    prompt_tokens: int
    generated_tokens: int
    skipped_tokens: int


def stream_headers(service: Service, characters: int, generation: Generation | None) -> dict[str, str]:
    """Of a stream, known before its first token; without a generation it tells of a failure."""
    return {
        "x-compute-type": compute_type(service),
        "x-compute-characters": str(characters),
        "x-accel-buffering": "no",
        "x-model-id": safe(service.config.model_id),
        **adapter_headers(generation),
    }


def answer_headers(service: Service, timing: Timing, generation: Generation, counts: Counts) -> dict[str, str]:
    """Of an answer that is complete."""
    done_at = now()
    queued_at = timing.validated_at
    sent_at = generation.routing.sent_at or queued_at
    first_token_at = generation.first_token_at or done_at
    inference = done_at - sent_at
    first = first_token_at - sent_at
    total = _milliseconds(done_at - timing.arrived_at)
    return {
        "x-compute-type": compute_type(service),
        "x-compute-time": total,
        "x-compute-characters": str(counts.characters),
        "x-total-time": total,
        "x-prompt-tokens": str(counts.prompt_tokens),
        "x-generated-tokens": str(counts.generated_tokens),
        "x-skipped-tokens": str(counts.skipped_tokens),
        "x-total-tokens": str(counts.prompt_tokens + counts.generated_tokens),
        "x-validation-time": _milliseconds(timing.validated_at - timing.arrived_at),
        "x-queue-time": _milliseconds(sent_at - queued_at),
        "x-inference-time": _milliseconds(inference),
        "x-time-per-token": _milliseconds(inference / max(counts.generated_tokens, 1)),
        "x-time-to-first-token": _milliseconds(first),
        "x-time-per-output-token": _milliseconds((inference - first) / max(counts.generated_tokens - 1, 1)),
        "x-model-id": safe(service.config.model_id),
        **adapter_headers(generation),
    }


def _milliseconds(seconds: float) -> str:
    return str(max(0, int(seconds * 1000)))
