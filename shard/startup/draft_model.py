"""Loads the draft model with the target's loader. Its KV uses the target's page numbers.

Both models must use the same token ids: if both folders have a tokenizer, their vocabularies must be equal.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lorikeet.proto.quantization import INTEGERS
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import Model, load_model

TOKENIZER = "tokenizer.json"


def load_draft_model(config: ShardConfig, target: Model) -> Model | None:
    """The configured draft model, or None. Raises ValueError with a reason if it cannot be served."""
    if config.draft_model is None:
        return None
    check_tokenizer(config)
    own = replace(
        config,
        model_id=config.draft_model_id,
        model_path=config.draft_model,
        dtype=config.draft_dtype,
        quantize=config.draft_quantize,
        quantize_activations=config.quantize_activations if config.draft_quantize in INTEGERS else None,
        page_size=target.page_size,
        adapter_store=None,
    )
    try:
        draft = load_model(own)
    except ValueError as reason:
        raise ValueError(f"the draft model {config.draft_model_id}: {reason}") from reason
    if draft.page_size != target.page_size:
        raise ValueError(
            f"the draft model {config.draft_model_id} needs pages of {draft.page_size} tokens, but {config.model_id} "
            f"uses {target.page_size}"
        )
    return draft


def check_tokenizer(config: ShardConfig) -> None:
    """Raises ValueError that names both models if their vocabularies differ."""
    assert config.draft_model is not None
    target, draft = read_vocabulary(config.model_path), read_vocabulary(config.draft_model)
    if target is not None and draft is not None and target != draft:
        raise ValueError(
            f"the draft model {config.draft_model_id} has another tokenizer than {config.model_id}: both models must "
            "use the same token ids"
        )


def read_vocabulary(folder: str) -> dict[int, Any] | None:
    """The text of each token id in the folder's tokenizer; None without a tokenizer that can be read."""
    path = Path(folder) / TOKENIZER
    if not path.exists():
        return None
    read = json.loads(path.read_text())
    vocab = read.get("model", {}).get("vocab")
    if isinstance(vocab, dict):
        texts = {token_id: text for text, token_id in vocab.items()}
    elif isinstance(vocab, list):  # Unigram: pairs of text and score, in order
        texts = {token_id: entry[0] for token_id, entry in enumerate(vocab)}
    else:
        return None
    return texts | {added["id"]: added["content"] for added in read.get("added_tokens", [])}
