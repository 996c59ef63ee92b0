"""Tokens of texts and of pairs of texts for embedding and classification models, cut to a length where asked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import tokenizers

from lorikeet.router.errors import ValidationError

Input = str | tuple[str, str]
"""A text, or two texts that are compared."""
MOST_CUT_CHARS = 1 << 18
"""Maximum characters of a text that is tokenized whole before it is cut."""
_GROUP_TEXTS, _GROUP_CHARS = 64, 1 << 15
"""Texts, and characters, that are tokenized by one job of a thread."""


@dataclass(frozen=True)
class Cut:
    """How texts become token ids."""

    most: int | None = None
    """Tokens that are kept, special ones included; None keeps all."""
    side: str = "right"
    """Where tokens are dropped."""
    add_special_tokens: bool = True
    has_types: bool = False
    """Whether the model gets the tokenizer's types of tokens, which tell the texts of a pair apart."""
    wants_offsets: bool = False
    """Whether the characters of each token are wanted."""


@dataclass(frozen=True)
class Encoded:
    """The tokens of a text or of a pair."""

    ids: list[int]
    second_text: int = 0
    """Index of the first token of the second text's type, 0 without any."""
    offsets: list[tuple[int, int]] = field(default_factory=list)
    """Characters of each token, (0, 0) for special ones; where wanted."""
    special: list[bool] = field(default_factory=list)
    """Whether each token was added by the tokenizer; where offsets are wanted."""


def groups(texts: Sequence[Input]) -> Iterator[list[Input]]:
    """Neighbouring texts that are tokenized together."""
    group: list[Input] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text) if isinstance(text, str) else len(text[0]) + len(text[1])
        if len(group) >= _GROUP_TEXTS or size >= _GROUP_CHARS:
            yield group
            group, size = [], 0
    if group:
        yield group


def encode_group(backend: tokenizers.Tokenizer, texts: Sequence[Input], cut: Cut) -> list[Encoded]:
    """The tokens of each. Runs in a thread; the library releases the GIL. Raises ValidationError."""
    if cut.most is not None:
        for text in texts:
            if max(map(len, (text,) if isinstance(text, str) else text)) > MOST_CUT_CHARS:
                raise ValidationError(f"a text of more than {MOST_CUT_CHARS} characters cannot be truncated")
    encode = backend.encode_batch if cut.wants_offsets else backend.encode_batch_fast
    encodings = encode(list(texts), add_special_tokens=cut.add_special_tokens)
    return [
        _encoded(encoding if cut.most is None or len(encoding) <= cut.most else _shortened(backend, text, cut), cut)
        for text, encoding in zip(texts, encodings, strict=True)
    ]


def _encoded(encoding: tokenizers.Encoding, cut: Cut) -> Encoded:
    types = encoding.type_ids if cut.has_types else ()
    second_text = types.index(1) if 1 in types else 0
    if not cut.wants_offsets:
        return Encoded(encoding.ids, second_text)
    return Encoded(encoding.ids, second_text, encoding.offsets, [bool(flag) for flag in encoding.special_tokens_mask])


def _shortened(backend: tokenizers.Tokenizer, text: Input, cut: Cut) -> tokenizers.Encoding:
    """Encoding of a truncated text or pair; the longer text is cut first (`longest_first`). Raises ValidationError."""
    assert cut.most is not None
    parts = (text,) if isinstance(text, str) else text
    plain = [backend.encode(part, add_special_tokens=False) for part in parts]
    num_added = backend.num_special_tokens_to_add(len(parts) > 1) if cut.add_special_tokens else 0
    left = cut.most - num_added
    if left < len(parts):
        raise ValidationError(f"nothing of a text is left when it is truncated to {cut.most} tokens")
    sizes = _sizes([len(part) for part in plain], left)
    for part, size in zip(plain, sizes, strict=True):
        part.truncate(size, direction=cut.side)
    second = plain[1] if len(plain) > 1 else None
    return backend.post_process(plain[0], second, add_special_tokens=cut.add_special_tokens)


def _sizes(lengths: list[int], most: int) -> list[int]:
    """What is kept of one or two texts, as by the library's `longest_first`."""
    if sum(lengths) <= most:
        return lengths
    if len(lengths) == 1:
        return [most]
    shorter, longer = sorted(lengths)
    longer = shorter if shorter > most else max(shorter, most - shorter)
    if shorter + longer > most:
        shorter = most // 2
        longer = most - shorter
    return [longer, shorter] if lengths[0] > lengths[1] else [shorter, longer]
