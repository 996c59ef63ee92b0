"""The random models that measurements run: made on the spot, seeded, kept out of git.

Knows shapes and a tokenizer whose words are one token each. Does not know what is measured.

    python -m benchmarks.models
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MODELS = Path(__file__).parent / ".models"
LETTERS = "abcdefghijklmnoprstu"
"""Twenty letters give 8 000 words of three: enough for the vocabulary."""
SEED = 20261121


@dataclass(frozen=True)
class Shape:
    """What the limit of a machine depends on."""

    hidden: int = 1024
    mlp: int = 2816
    layers: int = 16
    heads: int = 16
    kv_heads: int = 4
    vocabulary: int = 8192

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of every matrix product of one layer."""
        kv = self.kv_heads * self.head_dim
        attention = ((self.hidden, self.hidden), (kv, self.hidden), (kv, self.hidden), (self.hidden, self.hidden))
        return (*attention, (self.mlp, self.hidden), (self.mlp, self.hidden), (self.hidden, self.mlp))

    @property
    def num_multiplied(self) -> int:
        """Parameters that every token is multiplied with: the layers' matrices and the head."""
        return self.layers * sum(rows * columns for rows, columns in self.linears) + self.vocabulary * self.hidden

    @property
    def weight_bytes(self) -> int:
        """All weights in bf16: matrices, head, embedding, norms."""
        norms = (2 * self.layers + 1) * self.hidden
        return 2 * (self.num_multiplied + self.vocabulary * self.hidden + norms)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


LLAMA_200M = Shape()


def llama_200m() -> Path:
    """Folder of the 200 M-parameter Llama with random bf16 weights; made once."""
    folder = MODELS / "llama-200m"
    if (folder / "done.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    shape = LLAMA_200M
    torch.manual_seed(SEED)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        torch_dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer(shape.vocabulary).save_pretrained(folder)
    (folder / "done.json").write_text(json.dumps({"seed": SEED}))
    return folder


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as real models have, in which every word of `words` is exactly one token."""
    space = "Ġ"
    pieces = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    for length in (1, 2, 3):
        for letters in product(LETTERS, repeat=length):
            if len(pieces) == vocabulary:
                break
            merges.append((space + "".join(letters[:-1]), letters[-1]))
            pieces.append(space + "".join(letters))
    bpe = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="</s>", eos_token="</s>", pad_token="</s>")


def words(vocabulary: int) -> list[str]:
    """Words that are one token each after a space."""
    count = vocabulary - 257 - len(LETTERS) - len(LETTERS) ** 2
    return ["".join(letters) for letters, _ in zip(product(LETTERS, repeat=3), range(count), strict=False)]


def prompts(count: int, length: int, seed: int, known: Sequence[str]) -> list[str]:
    """`count` texts of `length` random words, that is tokens; no two begin alike, so no prefix can hit."""
    draw = random.Random(seed)
    firsts = draw.sample(known, count)
    return [" " + " ".join([first, *draw.choices(known, k=length - 1)]) for first in firsts]


if __name__ == "__main__":
    print(llama_200m())
