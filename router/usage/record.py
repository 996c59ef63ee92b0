"""The usage record of one ended request: names, counts and seconds, and texts only with `--log-texts`.

No field can hold a credential.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lorikeet.router.requests.caller import Caller
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import GenerationRequest

Texts = str | list[str] | None
"""One text as it is, several as a list, None where texts are not logged or there are none."""


class Unwritten(Exception):
    """Why a record was lost, as a text that may be logged."""


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """The keys of one line."""

    time: str
    """Time of the request's end, in UTC."""
    request_id: str
    route: str
    status: int
    key: str | None
    """Name of the server's API key, empty for the admin key."""
    model: str
    adapter: str | None
    """Its name as the caller wrote it, once it was resolved."""
    adapter_digest: str | None
    sequences: int
    """Texts that were started."""
    prompt_tokens: int
    """Each prompt counts once, however many sequences it has."""
    cached_tokens: int
    generated_tokens: int
    """Output tokens of all sequences, including those that `best_of` did not choose."""
    drafted_tokens: int
    accepted_tokens: int
    queue_seconds: float | None
    """None for a request that was never sent to a shard."""
    first_token_seconds: float | None
    """Time to first token, from the request's arrival; None where there was no token."""
    total_seconds: float
    finish_reasons: list[str | None]
    """By sequence; null for one that did not finish."""
    error: str | None
    """The reason of a failure, as in the label of `lorax_request_failure`."""
    input: Texts
    output: Texts


@dataclass(frozen=True, slots=True)
class Ending:
    """How an HTTP request ended."""

    route: str
    status: int
    error: str | None
    began_at: float
    """In seconds of the monotonic clock, like `ended_at`."""
    ended_at: float


def record(state: Mapping[str, Any], caller: Caller, ending: Ending, model: str) -> UsageRecord:
    """Usage record of one request. `state` is the request's, to which routes add `wanted` and `generations`."""
    wanted: list[GenerationRequest] = state.get("wanted", [])
    generations: list[Generation] = state.get("generations", [])
    adapter = wanted[0].adapter if wanted else None
    speculation_stats = [each.speculation_stats for each in generations if each.speculation_stats is not None]
    first_tokens = [each.first_token_at for each in generations if each.first_token_at is not None]
    return UsageRecord(
        time=datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        request_id=caller.request_id,
        route=ending.route,
        status=ending.status,
        key=None if caller.key is None else caller.key.name,
        model=model,
        adapter=None if adapter is None else adapter.name,
        adapter_digest=None if adapter is None or not generations else generations[0].digest or None,
        sequences=len(generations),
        prompt_tokens=sum(len(request.prompt_ids) for request, _ in _by_prompt(generations)),
        cached_tokens=sum(generation.num_cached for _, generation in _by_prompt(generations)),
        generated_tokens=sum(each.num_generated for each in generations),
        drafted_tokens=sum(each.num_drafted for each in speculation_stats),
        accepted_tokens=sum(each.num_accepted for each in speculation_stats),
        queue_seconds=_rounded(generations[0].routing.waited_s) if generations else None,
        first_token_seconds=_rounded(min(first_tokens) - ending.began_at) if first_tokens else None,
        total_seconds=round(ending.ended_at - ending.began_at, 6),
        finish_reasons=[None if each.finish_reason is None else each.finish_reason.value for each in generations],
        error=ending.error,
        input=_texts([request.text for request, _ in _by_prompt(generations)], generations),
        output=_texts(["".join(each.read_texts or ()) for each in generations], generations),
    )


def _by_prompt(generations: list[Generation]) -> Iterator[tuple[GenerationRequest, Generation]]:
    """The first sequence of each prompt; the others share its list of ids."""
    seen: set[int] = set()
    for generation in generations:
        if id(generation.request.prompt_ids) not in seen:
            seen.add(id(generation.request.prompt_ids))
            yield generation.request, generation


def _texts(texts: list[str], generations: list[Generation]) -> Texts:
    if not generations or generations[0].read_texts is None:
        return None
    return texts[0] if len(texts) == 1 else texts


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
