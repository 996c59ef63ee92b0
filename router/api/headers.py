"""Response headers: LoRAX's timings and counts, the request's id, the adapter, and the names of ignored fields.

Values that a client chose are sanitized here.
"""

import re
import secrets
from dataclasses import dataclass

from lorikeet.router.api.prepare import Timing, now
from lorikeet.router.api.service import Service
from lorikeet.router.requests.generation import Generation
from lorikeet.router.schemas.model import MAX_IGNORED

_UNSAFE = re.compile(r"[^\x20-\x7e]")
_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._:-]")

_MAX_NAME = 64


def safe(value: str) -> str:
    """`value` with `?` for every character that a header must not hold."""
    return _UNSAFE.sub("?", value)


def request_id(given: str | None) -> str:
    """The client's id without characters that could break a header or a log line; a new id where nothing is left."""
    cleaned = _NOT_IN_ID.sub("", given or "")[:128]
    return cleaned or secrets.token_hex(16)


def ignored_fields(names: list[str]) -> dict[str, str]:
    """`x-ignored-fields`, absent when nothing was ignored."""
    if not names:
        return {}
    shown = [safe(name[:_MAX_NAME]).replace(",", "?") for name in names[:MAX_IGNORED]]
    return {"x-ignored-fields": ", ".join(shown)}


def _common_headers(service: Service, characters: int, generation: Generation | None) -> dict[str, str]:
    """LoRAX's `gpu+optimized` where there is a GPU, the model, and the adapter, if any."""
    info = service.dispatcher.info
    headers = {
        "x-compute-type": "cpu+optimized" if info is not None and info.device.startswith("cpu") else "gpu+optimized",
        "x-compute-characters": str(characters),
        "x-model-id": safe(service.config.model_name),
    }
    adapter = None if generation is None else generation.request.adapter
    if generation is None or adapter is None:
        return headers
    is_activated = generation.adapters.is_activated
    if is_activated is not None:
        headers["x-lorikeet-adapter-activated"] = str(is_activated).lower()
    return headers | {
        "x-adapter-id": safe(adapter.name),
        "x-adapter-source": adapter.source,
        "x-adapter-revision": safe(adapter.revision),
        "x-adapter-digest": generation.digest,
        "x-lorikeet-adapter-tier": service.tier(generation),
    }


@dataclass(frozen=True)
class Counts:
    """Counts shown in headers."""

    characters: int
    prompt_tokens: int
    generated_tokens: int
    skipped_tokens: int


def stream_headers(service: Service, characters: int, generation: Generation | None) -> dict[str, str]:
    """Headers of a stream, known before its first token; `generation` is None for a request that failed."""
    return {"x-accel-buffering": "no", **_common_headers(service, characters, generation)}


def answer_headers(service: Service, timing: Timing, generation: Generation, counts: Counts) -> dict[str, str]:
    """Headers of a complete answer."""
    done_at = now()
    queued_at = timing.validated_at
    sent_at = generation.routing.sent_at or queued_at
    first_token_at = generation.first_token_at or done_at
    inference = done_at - sent_at
    first = first_token_at - sent_at
    total = _milliseconds(done_at - timing.arrived_at)
    return {
        **_common_headers(service, counts.characters, generation),
        "x-compute-time": total,
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
    }


def _milliseconds(seconds: float) -> str:
    return str(max(0, int(seconds * 1000)))
