"""Guessing ahead: guessers that only propose. What they propose never decides about the text, only about its speed."""

from shard.speculation.guessers import Guessers, Offer
from shard.speculation.lookup import Lookup
from shard.speculation.proposer import Proposer

__all__ = ["Guessers", "Lookup", "Offer", "Proposer"]
