"""Which guesser a request gets, and how many tokens it may guess in a step. Imports no torch."""

from dataclasses import dataclass

from shard.request import Guesser, Method, Request
from shard.speculation.lookup import Lookup


@dataclass(frozen=True)
class Guessers:
    """The same for all requests of a shard."""

    max_batch_size: int = 32
    """With more running requests nothing is guessed."""
    ngram_min: int = 1
    ngram_max: int = 8

    def width(self, request: Request, num_running: int) -> int:
        """Tokens to guess at most."""
        wanted = request.speculation
        return 0 if wanted.method is Method.OFF or num_running > self.max_batch_size else wanted.num_tokens

    def make(self, request: Request) -> Guesser:
        """For a request that may guess; it knows the request's tokens."""
        return Lookup(request.token_ids, self.ngram_min, self.ngram_max, request.speculation.prediction_ids)
