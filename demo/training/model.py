"""The built-in demo model: a small Llama in plain transformers, its shape and its files."""

from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from lorikeet.demo.data.tokenizer import BOS, END, EOS, PAD, SPECIAL_TOKENS, VOCABULARY_SIZE

BASE_FOLDER = Path(__file__).parents[1] / "base"


def base_config(**overrides: int) -> LlamaConfig:
    """5.8 million parameters, embeddings included. Grouped-query attention, because that is what people serve."""
    settings = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
    }
    return LlamaConfig(
        **(settings | overrides),
        tie_word_embeddings=True,
        bos_token_id=SPECIAL_TOKENS.index(BOS),
        eos_token_id=SPECIAL_TOKENS.index(EOS),
        pad_token_id=SPECIAL_TOKENS.index(PAD),
    )


def generation_config() -> GenerationConfig:
    return GenerationConfig(
        bos_token_id=SPECIAL_TOKENS.index(BOS),
        eos_token_id=[SPECIAL_TOKENS.index(EOS), SPECIAL_TOKENS.index(END)],
        pad_token_id=SPECIAL_TOKENS.index(PAD),
    )


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Writes bf16 safetensors and both configurations; the model in memory keeps its dtype."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16)
    copy.generation_config = generation_config()
    copy.save_pretrained(folder)
