"""The draft model: a second model by the same loader, whose KV shares page numbers with the target's.

It must read the same token ids as the target: where both folders have a tokenizer, the two must be equal.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import Model, load_model

TOKENIZER = "tokenizer.json"


def load_draft_model(config: ShardConfig, target: Model) -> Model | None:
    """The draft model that the configuration asks for. Raises ValueError with a reason when it cannot serve."""
    if config.draft_model is None:
        return None
    check_tokenizer(config)
    own = replace(
        config,
        model_id=config.draft_model_id,
        model_path=config.draft_model,
        dtype=config.draft_dtype,
        quantize=config.draft_quantize,
        page_size=target.page_size,
        adapter_store=None,
    )
    try:
        draft = load_model(own)
    except ValueError as reason:
        raise ValueError(f"the draft model {config.draft_model_id}: {reason}") from reason
    if draft.page_size != target.page_size:
        raise ValueError(
            f"the draft model {config.draft_model_id} takes pages of {draft.page_size} tokens, "
            f"{config.model_id} takes {target.page_size}"
        )
    return draft


def check_tokenizer(config: ShardConfig) -> None:
    """Raises ValueError, naming both models, where one's tokens are not the other's."""
    assert config.draft_model is not None
    ours, its = read_vocabulary(config.model_path), read_vocabulary(config.draft_model)
    if ours is not None and its is not None and ours != its:
        raise ValueError(
            f"the draft model {config.draft_model_id} has another tokenizer than {config.model_id}: a draft model "
            "must read and write the same token ids"
        )


def read_vocabulary(folder: str) -> dict[int, Any] | None:
    """Each token id's text as the folder's tokenizer has it; None without one that can be read."""
    path = Path(folder) / TOKENIZER
    if not path.exists():
        return None
    read = json.loads(path.read_text())
    vocab = read.get("model", {}).get("vocab")
    if isinstance(vocab, dict):
        found = {token_id: text for text, token_id in vocab.items()}
    elif isinstance(vocab, list):  # Unigram: pairs of text and score, in order
        found = {token_id: entry[0] for token_id, entry in enumerate(vocab)}
    else:
        return None
    return found | {added["id"]: added["content"] for added in read.get("added_tokens", [])}
