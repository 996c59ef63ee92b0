"""What the files of an embedding or classification model say about its texts and its labels."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lorikeet.proto import pooling
from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import ValidationError

_TYPED = frozenset({"bert", "electra", "ernie"})
"""Tokenizers that give types by default."""


@dataclass(frozen=True)
class PooledFiles:
    """Read when they are first needed: most servers have a model that generates text."""

    config: RouterConfig

    @cached_property
    def _configuration(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(Path(self.config.model_path, "config.json").read_bytes())
        return found

    @cached_property
    def _pooled(self) -> pooling.PooledModel | None:
        config = self.config
        return pooling.read(Path(config.model_path), self._configuration, config.pooling or "", config.embedding_dim)

    @cached_property
    def has_token_types(self) -> bool:
        """Whether transformers gives the model the types of tokens: as tokenizer_config.json says, or as BERT's."""
        path = Path(self.config.model_path, "tokenizer_config.json")
        settings: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
        if (names := settings.get("model_input_names")) is not None:
            return "token_type_ids" in names
        name = settings.get("tokenizer_class") or self._configuration.get("model_type", "")
        return str(name).lower().removesuffix("fast").removesuffix("tokenizer") in _TYPED

    def labels(self, num_labels: int) -> list[str]:
        """Names of the labels of scores: the model's, or numbers where an adapter has another number of them."""
        names = pooling.labels_of(self._configuration)
        return names if len(names) == num_labels else [f"LABEL_{index}" for index in range(num_labels)]

    @cached_property
    def activation(self) -> str:
        """What turns logits into scores: `sigmoid`, `softmax` or `none`."""
        return pooling.activation(self._configuration)

    @cached_property
    def prompts(self) -> dict[str, str]:
        """The model's prompts by name."""
        return {} if self._pooled is None else dict(self._pooled.prompts)

    def prompted(self, text: str, prompt_name: str | None = None) -> str:
        """The text as sentence-transformers gives it to the model: after the prompt of that name, or the default one.
        Raises ValidationError for an unknown name.
        """
        pooled, prompts = self._pooled, self.prompts
        if pooled is None:
            return text
        if prompt_name is not None and prompt_name not in prompts:
            known = ", ".join(prompts) or "none"
            raise ValidationError(f"`prompt_name` must be one of the model's prompts: {known}", "prompt_name")
        text = (pooled.default_prompt if prompt_name is None else prompts[prompt_name]) + text
        return text.lower() if pooled.lowercase else text
