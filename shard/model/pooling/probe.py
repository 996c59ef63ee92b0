"""The check at startup that an embedder or a classifier gives the same values here as in transformers.

As in lorikeet/shard/model/probe.py, but each prompt is one step's segment as a whole if the model is an encoder.
"""

import copy
from typing import Any

import torch

from lorikeet.proto.pooling import EMBED, TOKEN_CLASSIFY, PooledModel
from lorikeet.shard import attention
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model.attention_binding import NAME
from lorikeet.shard.model.model import Model
from lorikeet.shard.model.moe.experts import NAME as EXPERTS
from lorikeet.shard.model.pooling.loading import AUTO, assemble_pooled
from lorikeet.shard.model.probe import CHUNK, LENGTHS, TOLERANCE, VOCAB, largest_share, two_layers, vary

PADDING = 1
"""The copy's padding token, which RoBERTa counts positions from."""


def probe_pooled(config: ShardConfig, checkpoint: Any, pooled: PooledModel) -> None:
    """Raise ValueError when the two-layer copy of `checkpoint`'s architecture gives other values here."""
    small = two_layers(checkpoint.get_text_config())
    small.pad_token_id = PADDING
    device = torch.device(config.device)
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        rows = [torch.randint(PADDING + 1, VOCAB, (length,), device=device) for length in LENGTHS]
        try:
            expected, ours = _both_ways(config, small, pooled, rows, device)
        except Exception as failure:
            raise ValueError(f"cannot serve {checkpoint.model_type}: its two-layer copy fails: {failure}") from failure
    worst = largest_share(expected, ours)
    if not worst <= TOLERANCE:
        raise ValueError(
            f"cannot serve {checkpoint.model_type}: packed into one row its layers give other values "
            f"(one differs by {worst:.1e} of its size)"
        )


def _both_ways(
    config: ShardConfig, small: Any, pooled: PooledModel, rows: list[torch.Tensor], device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results of every row: each alone in transformers, all together here."""
    make, trust = AUTO[pooled.task].from_config, config.trust_remote_code
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": trust}
    network = make(copy.deepcopy(small), attn_implementation="eager", **options).eval().to(device)
    vary(network)
    expected = [_pooled(network(row[None]), pooled) for row in rows]
    ours = make(copy.deepcopy(small), attn_implementation=NAME, experts_implementation=EXPERTS, **options)
    ours.load_state_dict(network.state_dict())
    backend = attention.create(config.attention, device, torch.float32, config.page_size)
    inputs = StepInputs(backend.page_size, device)
    plain = PooledModel(pooled.task, pooled.pooling, pooled.is_encoder)
    model = assemble_pooled(
        ours.eval().to(device), small, plain, backend, torch.float32, inputs, max(LENGTHS), fusions=config.fusions
    )
    return expected, _in_steps(model, rows, pooled)


def _pooled(output: Any, pooled: PooledModel) -> torch.Tensor:
    """[n, size] what a prompt gives in transformers."""
    if pooled.task != EMBED:
        logits: torch.Tensor = output.logits[0].float()
        return logits.reshape(-1, logits.shape[-1])
    hidden_states: torch.Tensor = output.last_hidden_state[0].float()
    if pooled.pooling == "mean":
        return hidden_states.mean(0, keepdim=True)
    return hidden_states[:1] if pooled.pooling == "cls" else hidden_states[-1:]


def _in_steps(model: Model, rows: list[torch.Tensor], pooled: PooledModel) -> list[torch.Tensor]:
    """Results of every row, all rows in the same steps: of the whole rows, or of CHUNK tokens of each at a time."""
    pages = [range(i, 100, len(rows)) for i in range(len(rows))]
    model.allocate_kv(100)
    chunk = max(LENGTHS) if pooled.is_whole else CHUNK
    results: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    for start in range(0, max(LENGTHS), chunk):
        live = [i for i, row in enumerate(rows) if start < len(row)]
        parts = [rows[i][start : start + chunk] for i in live]
        ids = torch.cat(parts)
        segments = [Segment(start, len(part), pages[i]) for i, part in zip(live, parts, strict=True)]
        result_rows = [wanted_rows(len(part), pooled) for part in parts]
        firsts = torch.tensor([0, *(len(part) for part in parts[:-1])]).cumsum(0).tolist()
        indices = [first + row for first, row_range in zip(firsts, result_rows, strict=True) for row in row_range]
        model.inputs.fill(segments, ids, torch.tensor(indices, device=ids.device), indices)
        for i, values in zip(live, model.forward().split([len(row_range) for row_range in result_rows]), strict=True):
            results[i] = values
    return results


def wanted_rows(num_tokens: int, pooled: PooledModel) -> range:
    """Rows of a segment that give its results."""
    if pooled.task == TOKEN_CLASSIFY:
        return range(num_tokens)
    return range(1) if pooled.pooling == "cls" else range(num_tokens - 1, num_tokens)
