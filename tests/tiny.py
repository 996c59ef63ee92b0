"""Tiny random models of real architectures, made on the fly: small enough for milliseconds, scaled so that greedy
text varies (at least 12 distinct tokens in 24).

Windows, chunks and original lengths are so small that prompts of `LENGTHS` cross every one of them.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

VOCAB = 320
WINDOW = 12
ORIGINAL_LENGTH = 48
LENGTHS = (1, 2, 5, 11, 12, 13, 17, 24, 31, 33, 40, 47, 49, 57, 63, 70)
"""Prompt lengths below, at and above every threshold."""

_GQA: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
_MHA = {key: value for key, value in _GQA.items() if key != "num_key_value_heads"}
_GPT = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
_FALCON = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL_LENGTH,
    "short_factor": [1.0 + 0.05 * i for i in range(8)], "long_factor": [1.5 + 0.7 * i for i in range(8)],
}  # fmt: skip
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**_GQA}),
    "llama3_rope": (
        "llama",
        {
            **_GQA,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL_LENGTH,
            },
        },
    ),
    "mistral": ("mistral", {**_GQA, "sliding_window": WINDOW}),
    "mixtral": ("mixtral", {**_GQA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "qwen2": (
        "qwen2",
        {**_GQA, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {**_GQA, "head_dim": 24}),
    "qwen3_moe": (
        "qwen3_moe",
        {**_GQA, "head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
         "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [1]},
    ),
    "gemma": ("gemma", {**_GQA, "head_dim": 24, "num_key_value_heads": 1}),
    "gemma2": ("gemma2", {**_GQA, "head_dim": 24, "sliding_window": WINDOW, "layer_types": _SLIDING}),
    "gemma3_text": ("gemma3_text", {**_GQA, "head_dim": 24, "sliding_window": WINDOW, "layer_types": _SLIDING}),
    "phi": ("phi", {**_MHA, "partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {**_GQA, "sliding_window": WINDOW}),
    "phi3_longrope": (
        "phi3",
        {**_GQA, "original_max_position_embeddings": ORIGINAL_LENGTH, "rope_parameters": _LONGROPE},
    ),
    "gpt2": ("gpt2", {**_GPT}),
    "gpt_neox": ("gpt_neox", {**_MHA, "rotary_pct": 0.5}),
    "gpt_bigcode": ("gpt_bigcode", {**_GPT, "multi_query": True}),
    "starcoder2": ("starcoder2", {**_GQA, "sliding_window": WINDOW}),
    "opt": (
        "opt",
        {"vocab_size": VOCAB, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
         "max_position_embeddings": 128, "word_embed_proj_dim": 64},
    ),
    "bloom": ("bloom", {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 3, "n_head": 4}),
    "falcon_new": (
        "falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    ),
    "falcon_old": ("falcon", {**_FALCON, "new_decoder_architecture": False, "multi_query": True, "alibi": False}),
    "falcon_alibi": (
        "falcon",
        {**_FALCON, "hidden_size": 128, "num_attention_heads": 8, "new_decoder_architecture": False,
         "multi_query": False, "alibi": True},
    ),
    "mpt": ("mpt", {"vocab_size": VOCAB, "d_model": 96, "n_layers": 3, "n_heads": 6, "max_seq_len": 128}),
    "stablelm": ("stablelm", {**_GQA, "partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    "granite": (
        "granite",
        {**_GQA, "embedding_multiplier": 2.0, "logits_scaling": 0.5, "residual_multiplier": 0.7,
         "attention_multiplier": 0.3},
    ),
    "olmo2": ("olmo2", {**_GQA, "hidden_size": 96}),
    "cohere": ("cohere", {**_GQA, "logit_scale": 1.0, "use_qk_norm": True}),
    "gpt_oss": (
        "gpt_oss",
        {**_GQA, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW,
         "layer_types": _SLIDING,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0,
                             "beta_slow": 1.0, "truncate": False,
                             "original_max_position_embeddings": ORIGINAL_LENGTH}},
    ),
    "glm4": ("glm4", {**_GQA, "head_dim": 16}),
    "smollm3": ("smollm3", {**_GQA, "no_rope_layers": [1, 0, 1]}),
}  # fmt: skip
"""Name of a case → (model_type, configuration)."""

SEEDS = {"qwen3": 1, "gemma2": 1, "gemma3_text": 10, "phi": 1, "gpt_neox": 1, "cohere": 2, "bloom": 16,
         "mpt": 3, "falcon_alibi": 2, "olmo2": 7}  # fmt: skip
"""Seeds of cases whose text falls into a loop under seed 0."""


def config_of(name: str, **overrides: Any) -> Any:
    """The configuration of a case, untied by default, without tokens that end a text."""
    model_type, values = VARIANTS[name]
    ends = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}
    return AutoConfig.for_model(model_type, **{"tie_word_embeddings": False, **ends, **values, **overrides})


def make(name: str, folder: Path, *, seed: int | None = None, tokenizer: bool = False, **overrides: Any) -> Path:
    """Save a random model of case `name` in float32 to `folder`, with a tokenizer where asked. Returns the folder."""
    config = config_of(name, **overrides)
    torch.manual_seed(SEEDS.get(name, 0) if seed is None else seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    scale(model)
    model.generation_config.bos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    if tokenizer:
        make_tokenizer(config.vocab_size).save_pretrained(folder)
    return folder


def scale(model: Any) -> None:
    """Random weights large enough that every layer matters and greedy text does not fall into a loop.

    The head is blind to what all tokens have in common (activations with a mean make one token win everywhere).
    """
    # a head that shares the embedding's weight answers with the token it sees, unless the embedding is small
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                continue
            if parameter.dim() < 2:
                parameter.normal_(0, 0.1)
            elif "emb" in name or "wte" in name or "wpe" in name:
                parameter.normal_(0, 0.1 if tied else 0.5)
            else:
                parameter.normal_(0, 2.5 / parameter.shape[-1] ** 0.5)
        head, seen = model.get_output_embeddings(), []
        hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        model.eval()(torch.randint(0, head.weight.shape[0], (8, 40)), use_cache=False)
        hook.remove()
        common = torch.nn.functional.normalize(seen[0].flatten(0, 1).mean(0), dim=0)
        head.weight -= torch.outer(head.weight @ common, common)
        if not tied:
            head.weight *= 0.3  # small logits keep float32's own noise below what a test asks for


def make_realistic(name: str, folder: Path, dtype: torch.dtype, **overrides: Any) -> Path:
    """As `make`, in `dtype`, with weights like those of trained models: see `grow`."""
    torch.manual_seed(SEEDS.get(name, 0))
    model = AutoModelForCausalLM.from_config(config_of(name, **overrides), dtype=torch.float32)
    scale(model)
    grow(model)
    model.to(dtype).save_pretrained(folder)
    return folder


@torch.no_grad()
def grow(model: Any) -> None:
    """Norm weights over four orders of magnitude (of query and key norms one), large biases, outlier channels in all
    rows, and a massive activation where a text begins with token 0. Matrices shrink the columns that grew.
    """
    embedding = model.get_input_embeddings().weight
    embedding[:, :2] *= 10
    embedding[0, 3] = 300 * embedding[1:].square().mean().sqrt()
    for name, parameter in model.named_parameters():
        is_norm = "norm" in name or "ln_" in name
        if parameter.dim() == 1 and is_norm and name.endswith("weight"):
            exponents = torch.empty_like(parameter).uniform_(-2, 2)
            parameter.copy_(10 ** (exponents / 4 if ".q_" in name or ".k_" in name else exponents))
        elif parameter.dim() == 1 and not is_norm:
            parameter.normal_(0, 0.5)
    hooks = [module.register_forward_pre_hook(_shrink) for module in model.modules() if _multiplies(module)]
    ids = torch.randint(1, VOCAB, (4, 48))
    ids[:, 0] = 0
    model.eval()(ids, use_cache=False)
    for hook in hooks:
        hook.remove()


def _multiplies(module: Any) -> bool:
    """Whether it is a linear layer, or a mixture of experts."""
    return isinstance(module, torch.nn.Linear | Conv1D) or isinstance(_of_experts(module), torch.nn.Parameter)


def _of_experts(module: Any) -> Any:
    """[experts, in, out], or [experts, out, in], of a mixture of experts."""
    return getattr(module, "gate_up_proj", None)


def _shrink(module: Any, inputs: tuple[Any, ...]) -> None:
    """Divide the columns of weights by the size of their input: ordinary tokens then give outputs of ordinary size."""
    x = inputs[0]
    rows = (x[:, 1:] if x.dim() == 3 else x.view(4, -1, x.shape[-1])[:, 1:]).reshape(-1, x.shape[-1])
    sizes = rows.square().mean(0).sqrt().clamp(min=1e-6)
    weight = module.weight if isinstance(module, torch.nn.Linear | Conv1D) else _of_experts(module)
    is_transposed = weight.shape[-1] != len(sizes) or isinstance(module, Conv1D)
    weight /= sizes[:, None] if is_transposed else sizes


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with `<|endoftext|>` as its end; at least 257 entries."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max(vocab_size, 257),
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the quick brown fox jumps over the lazy dog; a parrot repeats what the adapters say, word for word. "
    core.train_from_iterator([text * 20, "def main() -> None:\n    return print('hello, world')\n" * 20], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|endoftext|>", bos_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
