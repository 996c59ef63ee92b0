"""Guessing ahead: guessers that only propose. What they propose never decides about the text, only about its speed."""

from shard.speculation.guessers import Guessers
from shard.speculation.lookup import Lookup

__all__ = ["Guessers", "Lookup"]
