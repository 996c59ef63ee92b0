"""Random prompts of exactly so many tokens for the models of `benchmarks/models/`."""

import random
from itertools import islice, product

LETTERS = "abcdefghijklmnoprstu"
"""Twenty letters give 8 000 words of three: enough for the vocabulary."""
NUM_BYTES = 256


def words(vocabulary: int) -> list[str]:
    """Words that are one token each after a space: what is left of the vocabulary next to bytes and shorter words."""
    count = vocabulary - NUM_BYTES - 1 - len(LETTERS) - len(LETTERS) ** 2
    return ["".join(letters) for letters in islice(product(LETTERS, repeat=3), count)]


def prompts(count: int, length: int, seed: int, vocabulary: int = 8192) -> list[str]:
    """`count` texts of `length` random words, that is tokens; no two begin alike, so no prefix can hit."""
    draw = random.Random(seed)
    known = words(vocabulary)
    return [" " + " ".join([first, *draw.choices(known, k=length - 1)]) for first in draw.sample(known, count)]
