"""A network whose result is a vector per prompt, or scores, in place of logits of a vocabulary.

The trunk runs on the flat row of the step. A head for classification is transformers' own: its code runs with a
stand-in for the trunk, which gives it the hidden states of the wanted rows as a batch of prompts of one token each.
"""

import inspect
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions, CausalLMOutputWithPast

from lorikeet.proto.pooling import CLASSIFY, EMBED
from lorikeet.shard.batch.inputs import StepInputs

Step = Callable[[torch.Tensor], torch.Tensor]


class GivenTrunk(nn.Module):
    """In place of the trunk of a model with a head: gives hidden states that were computed before."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler
        # [S, 1, H], or [1, S, H] for scores per token
        self.hidden_states = torch.empty(0)

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPoolingAndCrossAttentions:
        pooled = None if self.pooler is None else self.pooler(self.hidden_states)
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=self.hidden_states, pooler_output=pooled)


class Classifier(nn.Module):
    """The head of a classification model."""

    def __init__(self, network: Any, is_per_token: bool) -> None:
        """`network`'s trunk is replaced. `is_per_token`: whether it scores every token."""
        super().__init__()
        name = network.base_model_prefix
        self.given = GivenTrunk(take_pooler(getattr(network, name)))
        setattr(network, name, self.given)
        network.config.pad_token_id = -1  # no token is padding: every row is a prompt of one token
        self.network = network
        self.is_per_token = is_per_token

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [S, H]. Returns [S, labels]."""
        batch = hidden_states[None] if self.is_per_token else hidden_states[:, None]
        self.given.hidden_states = batch
        try:
            input_ids = torch.zeros(batch.shape[:2], dtype=torch.long, device=batch.device)
            logits: torch.Tensor = self.network(input_ids=input_ids).logits
        finally:
            self.given.hidden_states = batch[:0]
        return logits.flatten(0, -2)


class PooledNetwork(nn.Module):
    """Called like a network of transformers with an output head; `logits` are the results of the wanted rows."""

    def __init__(
        self, trunk: nn.Module, inputs: StepInputs, task: str, pooling: str, steps: list[Step], config: Any
    ) -> None:
        """`steps`: what follows the pooling, each from [S, in] to [S, out]. `config`: the trunk's."""
        super().__init__()
        self.trunk = trunk
        self.config = config
        self._inputs = inputs
        self._is_mean = pooling == "mean" and task in (EMBED, CLASSIFY)
        self._steps = steps
        parameters = inspect.signature(inspect.unwrap(trunk.forward)).parameters
        self._takes_types = "token_type_ids" in parameters and bool(getattr(config, "type_vocab_size", 0))
        embeddings = getattr(trunk, "embeddings", None)
        counts_from_padding = hasattr(embeddings, "create_position_ids_from_input_ids")
        self._padding_id = int(embeddings.padding_idx) if counts_from_padding else None  # type: ignore[union-attr]

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool, logits_to_keep: torch.Tensor
    ) -> CausalLMOutputWithPast:
        """input_ids, position_ids: [1, T]; logits_to_keep: [S] rows of T. Returns logits [1, S, size]."""
        arguments: dict[str, Any] = {}
        if self._takes_types:
            arguments["token_type_ids"] = self._token_types(input_ids)
        if self._padding_id is not None:
            position_ids = positions_after_padding(input_ids[0], position_ids[0], self._padding_id)[None]
        output = self.trunk(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, **arguments)
        hidden_states: torch.Tensor = output.last_hidden_state[0]
        if not len(logits_to_keep):  # no prompt ends in this step
            return CausalLMOutputWithPast(logits=hidden_states[None, :0])
        pooled = self._mean(hidden_states, logits_to_keep) if self._is_mean else hidden_states[logits_to_keep]
        for step in self._steps:
            pooled = step(pooled)
        return CausalLMOutputWithPast(logits=pooled[None])

    def _mean(self, hidden_states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """hidden_states: [T, H]; rows: [S] the last row of each segment, or all its rows. Returns [S, H]: means, summed
        row by row; of segments with a result per token their rows themselves.
        """
        inputs = self._inputs
        lengths = torch.from_numpy(inputs.counts).to(hidden_states.device, torch.long)
        num_tokens = int(inputs.counts.sum())
        means = torch.segment_reduce(hidden_states[:num_tokens].float(), "mean", lengths=lengths, axis=0)
        means = means.to(hidden_states.dtype)
        if not any(segment.per_token for segment in inputs.segments):
            return means.expand(rows.shape[0], -1)
        values = hidden_states[rows]
        widths = [segment.num_tokens if segment.per_token else 1 for segment in inputs.segments]
        firsts = [0, *accumulate(widths)]
        pooled = [(firsts[index], index) for index, segment in enumerate(inputs.segments) if not segment.per_token]
        if pooled:
            at, index = torch.tensor(pooled, device=rows.device).unbind(1)
            values[at] = means[index]
        return values

    def _token_types(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[1, T]: 1 for the tokens of the second text of a pair."""
        types = self._inputs.token_types()
        if types is None:
            return torch.zeros_like(input_ids)
        return types.expand(input_ids.shape[1])[None]


def positions_after_padding(input_ids: torch.Tensor, positions: torch.Tensor, padding_id: int) -> torch.Tensor:
    """Positions as in RoBERTa: they count the tokens other than padding, from `padding_id` + 1 on, and padding has
    `padding_id`. All are [T]; `positions` start from 0 in each prompt.
    """
    is_token = input_ids.ne(padding_id).long()
    counts = is_token.cumsum(0)
    firsts = torch.arange(len(positions), device=positions.device) - positions
    before = (counts - is_token)[firsts.clamp(min=0)]
    return (counts - before) * is_token + padding_id


class FirstTokenPooler(nn.Module):
    """Albert's pooling layer, which its trunk computes itself."""

    def __init__(self, linear: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.linear, self.activation = linear, activation

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [S, 1, H]. Returns [S, H]."""
        pooled: torch.Tensor = self.activation(self.linear(hidden_states[:, 0]))
        return pooled


def take_pooler(trunk: Any) -> nn.Module | None:
    """The trunk's own pooling layer, which no longer runs on the flat row; None if it has none."""
    pooler = getattr(trunk, "pooler", None)
    if not isinstance(pooler, nn.Module):
        return None
    trunk.pooler = None
    activation = getattr(trunk, "pooler_activation", None)
    return pooler if activation is None else FirstTokenPooler(pooler, activation)
