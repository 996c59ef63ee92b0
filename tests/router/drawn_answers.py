"""Answers of a scripted shard as a random model would give them: each token is drawn among those that the grammar
allows.
"""

import random
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from lorikeet.proto import shard_pb2
from lorikeet.proto.grammars import GRAMMAR_LIMITS
from tests.router.scripted_shard import Script
from tests.router.serving import EOS


@dataclass(frozen=True)
class DrawnAnswers:
    """`Serving.shard.answer`; a request's seed chooses the tokens."""

    tokenizer: LLTokenizer
    likely_ids: frozenset[int] = frozenset()
    """Tokens of which one is drawn at a tenth of the places where the grammar allows one."""

    def __call__(self, submit: shard_pb2.Submit) -> Script:
        """Up to the end of the grammar, or `max_new_tokens`."""
        matcher = LLMatcher(self.tokenizer, submit.grammar.text, limits=GRAMMAR_LIMITS, log_level=0)
        mask = allocate_token_bitmask(1, self.tokenizer.vocab_size)
        generator, drawn = random.Random(submit.seed), list[int]()
        while len(drawn) < submit.max_new_tokens and not matcher.is_stopped():
            fill_next_token_bitmask(matcher, mask, 0)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            likely = sorted(self.likely_ids.intersection(allowed.tolist())) if generator.random() < 0.1 else []
            token_id = EOS if EOS in allowed else int(generator.choice(likely or allowed))
            if token_id != EOS and not matcher.consume_token(token_id):
                return Script(drawn, error=f"the mask allows token {token_id}, and the grammar does not")
            drawn.append(token_id)
            if token_id == EOS:
                return Script(drawn)
        return Script([*drawn, EOS] if matcher.is_stopped() else drawn)
