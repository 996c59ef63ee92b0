"""Tiny random embedders and classifiers of real architectures, with a WordPiece tokenizer and, where asked, the
configuration files of sentence-transformers.

Windows are so small that prompts of `LENGTHS` exceed them.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)

from tests import tiny

VOCAB = 320
LENGTHS = (2, 3, 5, 11, 12, 13, 17, 24, 31, 33, 40, 47, 49, 57, 63, 70)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, _, CLS, SEP, _ = range(5)

_BERT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": PAD,
}  # fmt: skip
_GQA = {**_BERT, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": SEP}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", _BERT),
    "distilbert": (
        "distilbert",
        {"vocab_size": VOCAB, "dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 128,
         "pad_token_id": PAD},
    ),
    "roberta": ("roberta", {**_BERT, "type_vocab_size": 1}),
    "xlm-roberta": ("xlm-roberta", {**_BERT, "type_vocab_size": 1}),
    "camembert": ("camembert", {**_BERT, "type_vocab_size": 1}),
    "electra": ("electra", {**_BERT, "embedding_size": 48}),
    "ernie": ("ernie", _BERT),
    "albert": ("albert", {**_BERT, "embedding_size": 48}),
    "roberta-prelayernorm": ("roberta-prelayernorm", {**_BERT, "type_vocab_size": 1}),
    "xlm-roberta-xl": ("xlm-roberta-xl", {**_BERT, "type_vocab_size": 1}),
    "data2vec-text": ("data2vec-text", {**_BERT, "type_vocab_size": 1}),
    "modernbert": (
        "modernbert",
        {**_BERT, "local_attention": 12, "global_attn_every_n_layers": 2, "cls_token_id": CLS, "sep_token_id": SEP,
         "bos_token_id": CLS, "eos_token_id": SEP},
    ),
    "eurobert": ("eurobert", {**_GQA}),
    "llama": ("llama", _GQA),
    "qwen2": ("qwen2", _GQA),
    "qwen3": ("qwen3", {**_GQA, "head_dim": 24}),
    "mistral": ("mistral", {**_GQA, "sliding_window": tiny.WINDOW}),
}  # fmt: skip
"""Name of a case → (model_type, configuration)."""
DECODERS = ("llama", "qwen2", "qwen3", "mistral")
CLASSES = {
    "embed": AutoModel, "classify": AutoModelForSequenceClassification,
    "token-classify": AutoModelForTokenClassification, "generate": AutoModelForCausalLM,
}  # fmt: skip


def make(name: str, folder: Path, task: str = "embed", *, seed: int = 0, **overrides: Any) -> Path:
    """Save a random model of case `name` in float32, and its tokenizer, to `folder`. Returns the folder."""
    model_type, values = VARIANTS[name]
    config = AutoConfig.for_model(model_type, **{**values, **overrides})
    torch.manual_seed(seed)
    model = CLASSES[task].from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" not in parameter_name.lower():
                scale = 0.5 if "emb" in parameter_name else 1.5 / parameter.shape[-1] ** 0.5
                parameter.normal_(0, scale if parameter.dim() > 1 else 0.1)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def sentence_transformer(
    folder: Path, pooling: str = "mean", normalize: bool = True, dense: int = 0, size: int = 64, **settings: Any
) -> Path:
    """Add sentence-transformers' files to the model in `folder`: with a Dense module to `dense` dimensions, if any."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules += [("2_Dense", "Dense")] if dense else []
    modules += [("3_Normalize", "Normalize")] if normalize else []
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    flags = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
    chosen = {f"pooling_mode_{flag}": name == pooling for name, flag in flags.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": size, **chosen}))
    if settings:
        (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    if dense:
        make_dense(folder / "2_Dense", size, dense)
    return folder


def make_dense(folder: Path, num_in: int, num_out: int) -> None:
    """A Dense module of sentence-transformers with random weights."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(num_out)
    weight = torch.randn(num_out, num_in, generator=generator) / num_in**0.5
    save_file(
        {"linear.weight": weight, "linear.bias": torch.randn(num_out, generator=generator)},
        folder / "model.safetensors",
    )
    name = "torch.nn.modules.activation.Tanh"
    values = {"in_features": num_in, "out_features": num_out, "bias": True, "activation_function": name}
    (folder / "config.json").write_text(json.dumps(values))


def tokenizer() -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer that adds [CLS] and [SEP], and types of the texts of a pair."""
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCAB, special_tokens=list(SPECIAL), show_progress=False)
    text = "the quick brown fox jumps over the lazy dog; a parrot repeats what the adapters say, word for word. "
    core.train_from_iterator([text, "abcdefghijklmnopqrstuvwxyz ABC 0123456789 Berlin Paris Angela Smith"], trainer)
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=core, mask_token="[MASK]", model_max_length=126, **names)
