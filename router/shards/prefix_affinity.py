"""Which beginnings of prompts a shard should still have in its cache, as told by what it was sent.

A pure state machine. What a shard has dropped meanwhile it computes again: only the choice of a shard leans on this.
"""

from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 32
"""Tokens that are told apart at once."""
MOST_BLOCKS = 128
"""Of one prompt: whoever shares so many is alike."""


def keys_of(prompt_ids: Sequence[int], content: str, salt: str) -> tuple[int, ...]:
    """One key per full block, of all tokens up to its end, of the adapter's content and of the salt."""
    keys = []
    key = hash((content, salt))
    for start in range(0, min(len(prompt_ids) - BLOCK, MOST_BLOCKS * BLOCK) + 1, BLOCK):
        key = hash((key, *prompt_ids[start : start + BLOCK]))
        keys.append(key)
    return tuple(keys)


class Prefixes:
    """Of one shard, since its stream began."""

    def __init__(self, num_tokens: int) -> None:
        """`num_tokens`: what its cache holds."""
        self._most = num_tokens // BLOCK
        self._keys: OrderedDict[int, None] = OrderedDict()

    def sent(self, keys: Sequence[int]) -> None:
        """A prompt of these keys left for the shard."""
        for key in reversed(keys):  # of one prompt the end is forgotten first
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def num_shared(self, keys: Sequence[int]) -> int:
        """Leading blocks of a prompt that the shard should have."""
        for index, key in enumerate(keys):
            if key not in self._keys:
                return index
        return len(keys)
