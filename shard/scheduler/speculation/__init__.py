"""Guessing ahead: guessers that only propose. What they propose never decides about the text, only about its speed."""

from lorikeet.shard.scheduler.speculation.lookup import Lookup
from lorikeet.shard.scheduler.speculation.proposer import Proposer
from lorikeet.shard.scheduler.speculation.sources import DraftSources, Offer

__all__ = ["DraftSources", "Lookup", "Offer", "Proposer"]
