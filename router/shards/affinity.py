"""What a shard has that requests can reuse: adapters in slots, and beginnings of prompts in its prefix cache.

Pure state machines of one stream. They only influence the choice of a shard: what is missing there is loaded or
computed again.
"""

from collections import OrderedDict
from collections.abc import Sequence

from lorikeet.proto import shard_pb2 as pb

BLOCK = 32
"""Tokens per key."""
MAX_BLOCKS = 128
"""Maximum blocks of one prompt that get keys: longer common prefixes make no difference."""


class AdapterResidency:
    """Where adapters are, as the shard's AdapterState messages report: resident, loading, or requested."""

    def __init__(self) -> None:
        self._states: dict[str, int] = {}
        """By digest, without absent ones."""
        self.in_host_memory: set[str] = set()
        """Adapters that have left their slot, and are still in the shard's memory."""

    def prefetch(self, digest: str) -> bool:
        """Whether the shard needs a prefetch of `digest`, which counts as loading from now on."""
        if digest in self._states:
            return False
        self._states[digest] = pb.AdapterState.LOADING
        return True

    def update(self, state: pb.AdapterState) -> bool:
        """Take a report; True where it says that a resident adapter was evicted."""
        if state.residency == pb.AdapterState.HOST_MEMORY:
            self.in_host_memory.add(state.digest)
        else:
            self.in_host_memory.discard(state.digest)
        if state.residency in (pb.AdapterState.RESIDENT, pb.AdapterState.LOADING):
            self._states[state.digest] = state.residency
            return False
        return self._states.pop(state.digest, None) == pb.AdapterState.RESIDENT

    def is_resident(self, digest: str) -> bool:
        return self._states.get(digest) == pb.AdapterState.RESIDENT

    def tier(self, digest: str, elsewhere: str) -> str:
        """The nearest place of an adapter here: `slot` or `host`; `elsewhere` for one that the shard does not have."""
        if self.is_resident(digest):
            return "slot"
        return "host" if digest in self.in_host_memory else elsewhere

    @property
    def loading(self) -> list[str]:
        """Digests of adapters on their way into a slot."""
        return [digest for digest, state in self._states.items() if state == pb.AdapterState.LOADING]

    @property
    def num_resident(self) -> int:
        return sum(state == pb.AdapterState.RESIDENT for state in self._states.values())


def keys_of(prompt_ids: Sequence[int], content: str, salt: str) -> tuple[int, ...]:
    """One key per full block, of all tokens up to its end, of the adapter's content and of the salt."""
    keys = []
    key = hash((content, salt))
    for start in range(0, min(len(prompt_ids) - BLOCK, MAX_BLOCKS * BLOCK) + 1, BLOCK):
        key = hash((key, *prompt_ids[start : start + BLOCK]))
        keys.append(key)
    return tuple(keys)


class PrefixIndex:
    """Blocks of prompts that should still be in the shard's cache, estimated from what was sent."""

    def __init__(self, num_tokens: int) -> None:
        """`num_tokens`: the size of the cache."""
        self._max_keys = num_tokens // BLOCK
        self._keys: OrderedDict[int, None] = OrderedDict()

    def add(self, keys: Sequence[int]) -> None:
        """A prompt with these keys was sent to the shard."""
        for key in reversed(keys):  # the end of a prompt is evicted first
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)

    def num_shared(self, keys: Sequence[int]) -> int:
        """Leading blocks of a prompt that should be in the cache."""
        return next((index for index, key in enumerate(keys) if key not in self._keys), len(keys))
