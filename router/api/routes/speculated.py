"""What guessing ahead gave, as answers tell it: `details.speculation`, and the same in OpenAI's usage."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.types import SOURCE_NAMES


def speculation_report(generations: Sequence[Generation]) -> dict[str, Any] | None:
    """Of the sequences of one request together; None where nothing could be guessed for it.

    `steps` is the number of forwards that gave tokens, so `generated_tokens / steps` is the tokens per forward.
    """
    told = [
        (generation, generation.speculation_stats)
        for generation in generations
        if generation.speculation_stats is not None
    ]
    if not told:
        return None
    speculation = generations[0].request.speculation
    sources: Counter[int] = Counter()
    for _, speculation_stats in told:
        sources.update(speculation_stats.sources)
    return {
        "method": speculation.method,
        "verify": speculation.verify,
        "steps": sum(generation.num_generated - generation.num_skipped for generation, _ in told),
        "drafted": sum(speculation_stats.num_drafted for _, speculation_stats in told),
        "accepted": sum(speculation_stats.num_accepted for _, speculation_stats in told),
        "resampled": sources[pb.SOURCE_RESAMPLE],
        "bonus": sources[pb.SOURCE_BONUS],
        "draft_seconds": round(sum(speculation_stats.draft_seconds for _, speculation_stats in told), 6),
        "verify_seconds": round(sum(speculation_stats.verify_seconds for _, speculation_stats in told), 6),
        "accept_seconds": round(sum(speculation_stats.accept_seconds for _, speculation_stats in told), 6),
        "sources": {SOURCE_NAMES[source]: sources[source] for source in sorted(sources)},
    }
