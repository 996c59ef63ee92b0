"""The base's output head, read from its files without the rest of the base: learned heads are trained through it."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from lorikeet.adapters.errors import HeadsError, NotServed
from lorikeet.adapters.formats.base_model import BaseValues, Skeleton
from lorikeet.adapters.medusa.target import transforms


class BaseHead:
    """Weight and bias of the output head, and what the model does to its logits."""

    def __init__(self, skeleton: Skeleton, values: BaseValues, dtype: torch.dtype) -> None:
        """Raises HeadsError for a base whose output head cannot be read."""
        with skeleton.borrowed() as network:
            names = {id(module): name for name, module in network.named_modules()}
            output, inputs = network.get_output_embeddings(), network.get_input_embeddings()
            if output is None:
                raise HeadsError("the base has no output head, which Medusa heads need")
            name, has_bias = names[id(output)], getattr(output, "bias", None) is not None
            sources = [f"{name}.weight", f"{names[id(inputs)]}.weight"]
        tied = getattr(skeleton.config.get_text_config(), "tie_word_embeddings", False)
        # [V, H]
        self._weight = _first(values, sources[: 2 if tied else 1]).to(dtype)
        # [V]
        self._bias = _first(values, [f"{name}.bias"]).to(dtype) if has_bias else None
        self.name = name
        self.vocab_size, self.hidden_size = self._weight.shape
        *_, self._after = transforms(skeleton.config.get_text_config())

    @property
    def logits(self) -> Callable[[Tensor], Tensor]:
        """Hidden rows [S, H] → logits [S, V]."""
        return partial(_logits, self._weight, self._bias, self._after)

    def logits_of(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        """token_ids: [C]. Hidden rows [S, H] → logits [S, C] of these tokens."""
        bias = None if self._bias is None else self._bias[token_ids]
        return partial(_logits, self._weight[token_ids], bias, self._after)


def _logits(weight: Tensor, bias: Tensor | None, after: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    return after(linear(rows.to(weight.dtype), weight, bias))


def _first(values: BaseValues, names: list[str]) -> Tensor:
    problem = ""
    for name in names:
        try:
            return values[name]
        except NotServed as error:
            problem = str(error)
    raise HeadsError(problem)
