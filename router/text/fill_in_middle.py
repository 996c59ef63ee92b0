"""Fill-in-the-middle prompts: the special tokens that a code model's tokenizer has for them, and their order."""

from dataclasses import dataclass
from typing import Self

import tokenizers

_ANY_ORDER = "{prefix}{before}{suffix}{after}{middle}"
_SUFFIX_FIRST = "{suffix}{after}{prefix}{before}"


@dataclass(frozen=True)
class FillInMiddle:
    """One model family's tokens."""

    prefix: str
    """Before the text that precedes the gap."""
    suffix: str
    """Before the text that follows it."""
    middle: str = ""
    """Where the output begins."""

    @classmethod
    def find(cls, backend: tokenizers.Tokenizer) -> Self | None:
        """None where the tokenizer has no such tokens."""
        for tokens in _FAMILIES:
            if all(backend.token_to_id(token) is not None for token in tokens):
                return cls(*tokens)
        return None

    def prompt(self, before: str, after: str) -> str:
        """The prompt for the text between `before` and `after`."""
        form = _ANY_ORDER if self.middle else _SUFFIX_FIRST
        return form.format(prefix=self.prefix, suffix=self.suffix, middle=self.middle, before=before, after=after)


_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("[PREFIX]", "[SUFFIX]"),  # Codestral
)
