"""The random models that measurements run: made on the spot, seeded, kept out of git.

python -m benchmarks.models.random_llama
"""

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.evidence import arguments
from benchmarks.models.limit import LLAMA_200M
from benchmarks.models.prompts import LETTERS

MODELS = Path(__file__).parents[1] / ".models"
SEED = 20261121


def llama_200m() -> Path:
    """Folder of the 200 M-parameter Llama with random bf16 weights; made once."""
    shape = LLAMA_200M
    sizes = {"hidden_size": shape.hidden, "intermediate_size": shape.mlp, "num_hidden_layers": shape.layers}
    sizes |= {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
    return _made(MODELS / "llama-200m", {"seed": SEED}, sizes, "bfloat16")


def llama_tiny(folder: Path) -> Path:
    """A Llama of two narrow layers with the same tokenizer, in float32; made once. Its greedy texts vary."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return _made(folder, {"seed": SEED}, sizes, "float32", spread=8.0)


def random_llama(name: str, seed: int, spread: float = 1.0, **shape: int) -> Path:
    """Folder of a random Llama, without a tokenizer; made once. Matrices are `spread` times what transformers draws."""
    return _made(MODELS / name, {"seed": seed, "spread": spread, **shape}, shape, "bfloat16", spread)


def _made(
    folder: Path, settings: Mapping[str, float], sizes: Mapping[str, int], dtype: str, spread: float = 1.0
) -> Path:
    """The folder of a model, made if it has none of these settings. Without a size of the vocabulary it is that of the
    200 M Llama, and there is a tokenizer.
    """
    note = folder / "done.json"
    if note.exists() and json.loads(note.read_text()) == settings:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(int(settings["seed"]))
    shared = {"vocab_size": LLAMA_200M.vocabulary, "max_position_embeddings": 4096, "dtype": dtype}
    config = LlamaConfig(
        **{**shared, **sizes}, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(spread)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    if "vocab_size" not in sizes:
        tokenizer(LLAMA_200M.vocabulary).save_pretrained(folder)
    note.write_text(json.dumps(settings))
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


if __name__ == "__main__":
    arguments.parser(__doc__).parse_args()
    print(llama_200m())
