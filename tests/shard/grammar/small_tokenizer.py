"""A tokenizer of as many tokens as the fake model has: enough for JSON, with tokens of several characters."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import Any

import llguidance
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lorikeet.shard.grammar.compiler import GrammarCompiler
from tests.shard.fake_model import VOCAB_SIZE

EOS = 0
LETTERS = 'abcdefghilmnoprstuvy0123456789{}[]":,.-_'
PAIRS = ('{"', '":', '",', '"}', "tr", "ue", "al", "se", "nu", "ll", "er", "on")
OPTIONS: Any = {"whitespace_flexible": False}


@cache
def tokenizer() -> LLTokenizer:
    words = ["<end>", *LETTERS, *PAIRS]
    words += [f"<unused{number}>" for number in range(VOCAB_SIZE - len(words))]
    vocabulary = {word: number for number, word in enumerate(words)}
    merges = [(pair[0], pair[1]) for pair in PAIRS]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.add_special_tokens(["<end>"])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return LLTokenizer(made.to_str(), n_vocab=VOCAB_SIZE, eos_token=EOS)


def compiler() -> GrammarCompiler:
    """One whose compilations are over when `match` returns, and that takes in earlier outputs at once."""
    return Immediate(tokenizer, lambda: None)


class Immediate(GrammarCompiler):
    def _compile(self, grammar: str, caller: str) -> Future[Any]:
        compiling = super()._compile(grammar, caller)
        compiling.result()
        return compiling

    def _compile_apart(self, grammar: str, caller: str) -> Future[Any]:
        compiling = super()._compile_apart(grammar, caller)
        compiling.result()
        return compiling

    def _submit(self, caller: str, work: Callable[[], bool]) -> Future[bool]:
        running = super()._submit(caller, work)
        running.result()
        return running


def schema(value: dict[str, Any]) -> str:
    return str(LLMatcher.grammar_from_json_schema(json.dumps(value), overrides=OPTIONS))


def lark(text: str) -> str:
    return str(llguidance.grammar_from("grammar", text))


def regex(pattern: str) -> str:
    return str(LLMatcher.grammar_from_regex(pattern))


def choice(*texts: str) -> str:
    return str(llguidance.grammar_from("choice", json.dumps(texts)))


def text_of(token_ids: list[int]) -> str:
    return str(tokenizer().decode_str([each for each in token_ids if each != EOS]))
