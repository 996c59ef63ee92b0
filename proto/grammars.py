"""What router, which checks grammars, and shard, which runs them, must agree on: limits, and which tokens are text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

GRAMMAR_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=25_000,
    max_grammar_size=250_000,
)
"""Beyond them a grammar is an error; none of them is a time."""
ALL_EXCLUDED = "the masks of the request (allowed_token_ids, bad_words, min_tokens) exclude every token"
"""What a shard says of such a request, so that the router names the fields."""
FREE_S, MAX_MATCHING_S = 0.01, 2.0
"""Processor time that a grammar may take for each token of an output, and in all tokens that take more than that."""
TOO_SLOW = (
    f"the grammar takes too long to match: {MAX_MATCHING_S:g} s of processor time are over. Simplify it: it is slow"
    " where text can be read in very many ways"
)
"""What a shard says of such a request."""
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_grammar_tokenizer(folder: Path, vocab_size: int | None = None) -> LLTokenizer:
    """The tokenizer of the model in `folder`, padded to `vocab_size` tokens. Takes seconds for a large vocabulary.

    An added token is text like any other token, so that a grammar matches it and the tokens that spell it. Special
    tokens, which are hidden in the output, are not: a grammar names them, as `<|name|>` or `<[id]>`.

    Raises OSError or ValueError for a model without a fast tokenizer.
    """
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    eos_ids = _eos_ids(folder)
    return grammar_tokenizer(text, vocab_size, eos_ids, _named_tokens(folder))


def grammar_tokenizer(
    text: str, vocab_size: int | None = None, eos_ids: Sequence[int] = (), named: Sequence[str] = ()
) -> LLTokenizer:
    """The tokenizer that the text of a tokenizer.json describes. The first of `eos_ids` ends outputs; they and the
    tokens `named` are special, whatever the text says. Raises ValueError.
    """
    eos_id = eos_ids[0] if eos_ids else None
    base = LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_id, slices=[])
    added = json.loads(text).get("added_tokens") or []
    plain_ids = {token["id"] for token in added if not token["special"] and token["content"] not in named} - set(
        eos_ids
    )
    wrapper = TokenizerWrapper(_TextTokens(base, plain_ids, eos_ids))
    return LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=base.eos_token)


class _TextTokens:
    """A vocabulary as TokenizerWrapper takes it. llguidance itself takes every token of the form <name> as special, and
    reads special tokens from texts of grammars, which it then does not accept.
    """

    bos_token_id = None

    def __init__(self, base: LLTokenizer, plain_ids: set[int], special_ids: Sequence[int]) -> None:
        self._base = base
        ids = range(base.vocab_size)
        self.eos_token_id = base.eos_token
        self.tokens = [base.decode_bytes([token_id]) for token_id in ids]
        self.special_token_ids = [
            token_id
            for token_id in ids
            if token_id in special_ids or (base.is_special_token(token_id) and token_id not in plain_ids)
        ]
        self._special_ids = frozenset(self.special_token_ids)

    def __call__(self, text: bytes) -> list[int]:
        """The tokens that write `text`."""
        ids = self._base.tokenize_bytes(text)
        return self._base.greedy_tokenize(text.decode()) if self._special_ids.intersection(ids) else ids


def _eos_ids(folder: Path) -> list[int]:
    """The end-of-sequence tokens of the first of the model's configurations that names any."""
    for name in ("generation_config.json", "config.json"):
        named = _json(folder / name).get("eos_token_id")
        ids = [token_id for token_id in (named if isinstance(named, list) else [named]) if isinstance(token_id, int)]
        if ids:
            return ids
    return []


def _named_tokens(folder: Path) -> list[str]:
    """The texts of the tokens that the tokenizer's configuration names."""
    settings = {**_json(folder / "special_tokens_map.json"), **_json(folder / "tokenizer_config.json")}
    named = [settings.get(name) for name in _NAMED_TOKENS]
    texts = [token.get("content") if isinstance(token, dict) else token for token in named]
    return [token for token in texts if isinstance(token, str)]


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
