"""The checks at startup that an architecture gives the same logits here as in transformers, and that a network's values
fit float16.

A two-layer random copy runs with transformers' attention, each prompt alone, then with ours: packed, paged and in
chunks. Any difference rejects the architecture with an error that names it. The copy's windows are short, so that
prompts exceed them.
"""

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from lorikeet.shard import attention
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model.attention_binding import NAME
from lorikeet.shard.model.build import assemble
from lorikeet.shard.model.kernels.integer import single_threaded
from lorikeet.shard.model.model import Model
from lorikeet.shard.model.moe.experts import NAME as EXPERTS
from lorikeet.shard.model.quantization.layers import num_parameters
from lorikeet.shard.model.tensor_parallel.group import Group
from lorikeet.shard.model.tensor_parallel.partitioning import TensorParallelUnsupported
from lorikeet.shard.system import comparison

LENGTHS = (37, 5, 18)
CHUNK = 13
WINDOW = 7
VOCAB = 64
TOLERANCE = 1e-3
"""Tolerance as a share of each logit and of its column's root mean square; both sides compute in float32."""
FEW_PARAMETERS = 1 << 24
"""A copy below this size runs in one thread: several would mostly wait for each other while other processes start."""

FLOAT16_MAX = torch.finfo(torch.float16).max
OVERFLOW_TOKENS = 64
"""Tokens of the prompt that must not overflow float16."""


def probe(config: ShardConfig, checkpoint: Any, group: Group | None = None) -> None:
    """Raise ValueError when the two-layer copy of `checkpoint`'s architecture gives other logits here, split over the
    ranks of `group`.
    """
    small = two_layers(checkpoint.get_text_config())
    device = torch.device(config.device)
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)  # seeds the device's generator too
        rows = [torch.randint(0, VOCAB, (length,), device=device) for length in LENGTHS]
        try:
            expected, ours = _both_ways(config, small, rows, device, group)
        except TensorParallelUnsupported:
            raise
        except Exception as failure:
            raise ValueError(f"cannot serve {checkpoint.model_type}: its two-layer copy fails: {failure}") from failure
    worst = largest_share(expected, ours)
    if not worst <= TOLERANCE:
        raise ValueError(
            f"cannot serve {checkpoint.model_type}: packed into one row its layers give other logits "
            f"(a logit differs by {worst:.1e} of its size)"
        )


def largest_share(expected: list[torch.Tensor], ours: list[torch.Tensor]) -> float:
    """The largest difference of an element, as a share of its size. expected, ours: [n, C] of each prompt."""
    return float(comparison.per_channel(torch.cat(expected), torch.cat(ours)).max())


def vary(network: nn.Module) -> None:
    """Draw weights that a fault cannot hide behind. Drawn for training, norms' weights are all alike, biases zero, and
    matrices so small that attention hardly differs from a mean.
    """
    embeddings = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    for parameter in network.parameters():
        if parameter.dim() < 2:
            parameter.add_(0.5 * torch.randn_like(parameter))
        elif id(parameter) not in embeddings:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)


def reject_overflow(model: Model, first_token: int, num_tokens: int, result_rows: range) -> None:
    """Raise ValueError where the model computes in float16 and some results are not finite, for `first_token` and
    tokens from all parts of the vocabulary. `result_rows`: rows whose results are computed. Drops all pages.
    """
    if model.info.dtype != torch.float16:
        return
    ids = torch.linspace(0, model.info.vocab_size - 1, num_tokens, device=model.info.device).long()
    ids[0] = first_token
    num_pages = -(-num_tokens // model.page_size)
    model.allocate_kv(num_pages)
    rows = torch.tensor(result_rows, device=model.info.device)
    model.inputs.fill([Segment(0, num_tokens, range(num_pages))], ids, rows, list(result_rows))
    is_finite = bool(model.forward().isfinite().all())
    model.free_kv()
    if not is_finite:
        raise ValueError(
            f"cannot serve {model.info.model_type} in float16: its activations exceed {FLOAT16_MAX:,.0f}, the largest "
            "number of float16: use --dtype bfloat16, or float32"
        )


def two_layers(text_config: Any) -> Any:
    """A copy of the configuration with two layers of different kinds, a small vocabulary and short windows."""
    small = copy.deepcopy(text_config)
    if hasattr(small, "quantization_config"):  # its weights are random and stay plain
        del small.quantization_config
    kinds = list(getattr(small, "layer_types", None) or ())
    small.num_hidden_layers = 2
    if kinds:
        second = next((kind for kind in kinds if kind != kinds[0]), kinds[0])
        small.layer_types = [kinds[0], second]
    if getattr(small, "sliding_window", None):
        small.sliding_window = WINDOW
    small.vocab_size = VOCAB
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    return small


def _both_ways(
    config: ShardConfig, small: Any, rows: list[torch.Tensor], device: torch.device, group: Group | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits of every row: each alone in transformers, all together here."""
    with device:  # drawing the weights on the host takes minutes for large experts
        network = AutoModelForCausalLM.from_config(
            small, dtype=torch.float32, attn_implementation="sdpa" if small.model_type == "falcon" else "eager",
            trust_remote_code=config.trust_remote_code,
        )  # fmt: skip
    network = network.eval().to(device)
    vary(network)
    with single_threaded() if num_parameters(network) < FEW_PARAMETERS else nullcontext():
        expected = [network(row[None], use_cache=False).logits[0].float() for row in rows]
        with device, no_init_weights():
            ours = AutoModelForCausalLM.from_config(
                copy.deepcopy(small), dtype=torch.float32, attn_implementation=NAME, experts_implementation=EXPERTS,
                trust_remote_code=config.trust_remote_code,
            )  # fmt: skip
        ours.load_state_dict(network.state_dict(), assign=True)  # two layers of a large model are gigabytes
        ours.tie_weights()
        del network
        backend = attention.create(config.attention, device, torch.float32, config.page_size)
        inputs = StepInputs(backend.page_size, device)
        ours = ours.eval().to(device)
        model = assemble(ours, small, backend, torch.float32, inputs, max(LENGTHS), group, fusions=config.fusions)
        return expected, _in_chunks(model, rows)


def _in_chunks(model: Model, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits of every row, all rows in the same steps, CHUNK tokens of each at a time."""
    pages = [range(i, 100, len(rows)) for i in range(len(rows))]
    model.allocate_kv(100)
    logits: list[list[torch.Tensor]] = [[] for _ in rows]
    for start in range(0, max(LENGTHS), CHUNK):
        live = [i for i, row in enumerate(rows) if start < len(row)]
        parts = [rows[i][start : start + CHUNK] for i in live]
        segments = [Segment(start, len(part), pages[i]) for i, part in zip(live, parts, strict=True)]
        ids = torch.cat(parts)
        model.inputs.fill(segments, ids, torch.arange(len(ids), device=ids.device))
        for i, part in zip(live, model.forward().split([len(part) for part in parts]), strict=True):
            logits[i].append(part)
    return [torch.cat(parts) for parts in logits]
