"""Where adapters are, as shards say: which contents are resident, on their way, or were asked for.

A pure state machine over the shard's AdapterState messages. What a shard does not mention is not there.
"""

from lorikeet.proto import shard_pb2 as pb


class Residency:
    """Of one stream: a new one starts from nothing."""

    def __init__(self) -> None:
        self._states: dict[str, int] = {}
        """By digest; absent ones are not kept."""

    def prefetch(self, digest: str) -> bool:
        """Whether the shard should be told that `digest` will be needed; it counts as on its way then."""
        if digest in self._states:
            return False
        self._states[digest] = pb.AdapterState.LOADING
        return True

    def moved(self, state: pb.AdapterState) -> bool:
        """What the shard says of one content; whether it left its slot by that."""
        if state.residency in (pb.AdapterState.RESIDENT, pb.AdapterState.LOADING):
            self._states[state.digest] = state.residency
            return False
        return self._states.pop(state.digest, None) == pb.AdapterState.RESIDENT

    def is_resident(self, digest: str) -> bool:
        return self._states.get(digest) == pb.AdapterState.RESIDENT

    @property
    def num_resident(self) -> int:
        return sum(state == pb.AdapterState.RESIDENT for state in self._states.values())

    def clear(self) -> None:
        self._states.clear()
