"""Which learned Medusa heads draft for the requests of a tenant and adapter. Imports no torch."""

from collections.abc import Iterator

from lorikeet.shard.requests.request import Request

Pair = tuple[str, str]
"""The tenant, and the digest of the adapter."""


def pair_of(request: Request) -> Pair | None:
    """The pair whose heads a request learns and uses; None if it takes no part."""
    if not request.learner or not request.speculation.takes_heads:
        return None
    return request.learner, request.adapter_digest


class LearnedHeads:
    """The adopted heads of a shard, by pair."""

    def __init__(self) -> None:
        self._digests: dict[Pair, str] = {}

    def adopt(self, pair: Pair, digest: str) -> None:
        """From now on these heads draft for the pair; "" for none."""
        if digest:
            self._digests[pair] = digest
        else:
            self._digests.pop(pair, None)

    def of(self, request: Request) -> str:
        """The digest of the heads that should draft for a request; "" for those that it came with."""
        pair = pair_of(request)
        return "" if pair is None else self._digests.get(pair, "")

    def __iter__(self) -> Iterator[Pair]:
        return iter(list(self._digests))
