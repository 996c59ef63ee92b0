"""Guessing ahead: guessers that only propose. What they propose never decides about the text, only about its speed."""

from lorikeet.shard.scheduler.speculation.lookup import Lookup
from lorikeet.shard.scheduler.speculation.proposer import Proposer
from lorikeet.shard.scheduler.speculation.sources import Guessers, Offer

__all__ = ["Guessers", "Lookup", "Offer", "Proposer"]
