"""Small tokenizers of the usual kinds, trained in the test."""

from functools import cache

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog; the dog sleeps, and the fox jumps again.",
    "def value(self):\n    return self.total + other.total\n\n\nclass Total:\n    pass\n",
    "Grüße aus Köln, où l'été est déjà fini – naïve façade, señor Ångström.",
    "日本語のテキストと中文文本，以及一些标点。",
    "emoji 🙂🙃 and 👩‍👩‍👧 and flags 🇩🇪",
]
SPECIAL = ["<s>", "</s>", "<|turn|>"]


@cache
def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2's, Llama 3's or Qwen's."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(["    ", "größe"])  # added text that is not in the byte alphabet
    return tokenizer


def _byte_tokens() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def sentencepiece_like() -> tokenizers.Tokenizer:
    """As Llama 2's, Mistral's or Gemma's: unigram pieces with a space mark, bytes for what is not in the vocabulary."""
    pieces = [
        "▁",
        "▁the",
        "the",
        "▁fox",
        "▁jumps",
        "ox",
        "s",
        "e",
        "t",
        "h",
        "o",
        "x",
        "▁a",
        "n",
        "d",
        "\n",
        "ü",
        "日",
        ".",
    ]
    scores = [(word, 0.0) for word in SPECIAL] + [(byte, -20.0) for byte in _byte_tokens()]
    scores += [(piece, -1.0 - len(pieces) / 10 - 1 / len(piece)) for piece in pieces]
    tokenizer = tokenizers.Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


@cache
def metaspace() -> tokenizers.Tokenizer:
    """As T5's or XGLM's: a space mark, no bytes."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


@cache
def word_pieces() -> tokenizers.Tokenizer:
    """A decoder whose output depends on neighbouring tokens, so only decoding again is correct."""
    words = [*SPECIAL, "[UNK]", "the", "fox", "jump", "##s", "##ing", "dog", ".", "a", "##b"]
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+|(?=\.)"), "removed")
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


BYTEWISE = {"byte_level": byte_level, "sentencepiece_like": sentencepiece_like, "metaspace": metaspace}
ALL = {**BYTEWISE, "word_pieces": word_pieces}
