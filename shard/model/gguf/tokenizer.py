"""The tokenizer of a `.gguf` file: transformers builds it, and this adds what llama.cpp knows by the name of how texts
are split (`tokenizer.ggml.pre`), which files leave out.
"""

from pathlib import Path
from typing import Any

from tokenizers import normalizers, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
from transformers.integrations.gguf import gguf_tokenizer_mapping
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

from lorikeet.shard.model.gguf.file import GgufFile

SPLITS: dict[str, str] | None = getattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", None)
"""transformers' regular expressions by kind. None before 5.18, which splits all texts as GPT-2 does, and those of Gemma
into single letters.
"""
LIKE_LLAMA_3 = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
)  # fmt: skip
"""Whole words of the vocabulary are tokens whatever the merges say, and texts begin with a token unless a flag says
otherwise.
"""
LIKE_GPT_2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "default", None)
DIGIT_BY_DIGIT = ("smollm", "starcoder", "refact", "command-r", "codeshell")
"""As GPT-2, but every digit is a word."""
NORMALIZED = ("qwen2",)
"""Texts are in Unicode's form C."""
CONTROL, USER_DEFINED = 3, 4
ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<|return|>", "<|call|>",
    "<end_of_turn>", "<|end_of_turn|>", "<|endofturn|>", "<eos>", "</s>", "<EOT>", "_<EOT>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
"""Texts of special tokens that end an answer in every model that has them."""


def read_tokenizer(folder: Path, name: str, file: GgufFile, config: PreTrainedConfig) -> Any:
    """transformers' tokenizer of `file`, whose metadata is written to `name` in `folder`. Raises ValueError for texts
    that are split in an unknown way, and where transformers is too old to split them.
    """
    if SPLITS is None:
        raise ValueError("its tokenizer needs transformers 5.18 or newer: pip install 'transformers>=5.18'")
    kind, split = (file.value(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    is_bpe = kind == "gpt2"
    if is_bpe and split not in (*SPLITS, *LIKE_GPT_2, *DIGIT_BY_DIGIT):
        raise ValueError(f"its pre-tokenizer is not supported (tokenizer.ggml.pre {split})")
    is_like_llama_3 = is_bpe and split in LIKE_LLAMA_3
    # The file's own flag comes first. As llama.cpp, later versions begin SentencePiece's texts with a token; not 5.18.
    begins = {"add_bos_token": True} if is_like_llama_3 or kind == "llama" else {}
    file.write_metadata(folder / name)
    tokenizer: Any = class_for(config).from_pretrained(folder, gguf_file=name, **begins)
    backend = tokenizer.backend_tokenizer
    if is_like_llama_3:
        backend.model.ignore_merges = True
    if is_bpe and split in DIGIT_BY_DIGIT:
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    if is_bpe and split in NORMALIZED:
        backend.normalizer = normalizers.NFC()
    return tokenizer


def class_for(config: PreTrainedConfig) -> Any:
    """The class that AutoTokenizer would choose, which would first read the configuration again for seconds."""
    found = TOKENIZER_MAPPING.get(type(config), PreTrainedTokenizerFast)
    return PreTrainedTokenizerFast if found.__name__ == "MistralCommonBackend" else found  # that one reads other files


def ends_of_text(file: GgufFile) -> list[int]:
    """Ids of the tokens that end an answer, the file's own end of text first."""
    named = [file.value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, kinds = (file.value(f"tokenizer.ggml.{name}") or () for name in ("tokens", "token_type"))
    listed = [
        number
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (CONTROL, USER_DEFINED) and token in ENDS
    ]
    return list(dict.fromkeys(number for number in (*named, *listed) if number is not None))
