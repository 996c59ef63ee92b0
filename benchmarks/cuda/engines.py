"""Random models of true shapes, made on the device, and engines around them: everything but the weights is loaded as a
shard loads it.
"""

import contextlib
import gc
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.cuda.setup import LlamaShape, Setup
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import Model, load_model
from lorikeet.shard.model.attention_binding import NAME
from lorikeet.shard.model.moe import experts
from lorikeet.shard.model.quantization.layers import quantize_loaded
from tests.shard.engine.harness import EngineHarness, EngineRequest, Run


def configured(setup: Setup, folder: Path, **settings: Any) -> ShardConfig:
    """A shard's configuration. Raises ValueError that names settings which this shard does not have."""
    unknown = sorted(set(settings) - {field.name for field in fields(ShardConfig)})
    if unknown:
        raise ValueError(f"this shard has no setting {', '.join(unknown)}")
    common = {"device": setup.device, "dtype": setup.dtype, "prefix_caching": False, "learning_memory": 0}
    return ShardConfig("random", str(folder), "unix:/dev/null", **{**common, **settings})


def write_config(shape: LlamaShape, folder: Path, dtype: str) -> Path:
    """A folder that holds a configuration and no weights."""
    LlamaConfig(**shape.config(), dtype=dtype, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return folder


def load(setup: Setup, shape: LlamaShape, **settings: Any) -> tuple[ShardConfig, Model]:
    """A random model, the same numbers for the same seed, and what it was loaded by."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_config(shape, Path(name), setup.dtype)
        config = configured(setup, folder, **settings)

        def draw(
            config: ShardConfig, checkpoint: Any, dtype: torch.dtype, method: str | None, **_: object
        ) -> nn.Module:
            network = random_network(checkpoint, dtype, config.device, setup.seed)
            quantize_loaded(network, method, dtype, config.device, rounds_activations=config.device == "cpu")
            return network

        with patch("lorikeet.shard.model.load_network", draw):
            return config, load_model(config)


def random_network(checkpoint: Any, dtype: torch.dtype, device: str, seed: int, attention: str = NAME) -> nn.Module:
    """transformers' network with the numbers that transformers would draw, on the device from the beginning."""
    torch.manual_seed(seed)
    with torch.device(device):
        network: nn.Module = AutoModelForCausalLM.from_config(
            checkpoint, dtype=dtype, attn_implementation=attention, experts_implementation=experts.NAME
        )
    network.requires_grad_(False)
    return network.eval()


def room(setup: Setup, num_requests: int, num_tokens: int) -> dict[str, Any]:
    """Settings with which the given number of requests of so many tokens fit, and no more; one alone may be as long as
    a server usually lets it, since what is captured depends on that.
    """
    memory = {} if setup.is_cuda else {"cpu_memory": 2**28}
    return {
        "max_total_tokens": max(num_tokens, setup.longest),
        "max_running": num_requests,
        "max_batch_total_tokens": num_requests * (num_tokens + 512),
        **memory,
    }


def prompts(setup: Setup, shape: LlamaShape, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Random prompts."""
    choice = np.random.default_rng([setup.seed, seed])
    found: list[list[int]] = choice.integers(1, shape.vocabulary, (count, length)).tolist()
    return found


def wanted(setup: Setup, shape: LlamaShape, count: int, **asked: Any) -> list[EngineRequest]:
    """So many requests with prompts and texts of full length."""
    return [EngineRequest(ids, setup.text, **asked) for ids in prompts(setup, shape, count, setup.prompt)]


def step_of(runs: list[Run]) -> dict[str, float]:
    """Times of requests that ran all at once: of a step while all of them did, and how long the device waited for the
    host before one, as the shard tells it.
    """
    start, end = max(run.steps[0].at for run in runs), min(run.steps[-1].at for run in runs)
    inside = [[gave for gave in run.steps if start < gave.at <= end] for run in runs]
    num_steps, num_tokens = len(inside[0]), sum(len(gave.token_ids) for gaves in inside for gave in gaves)
    if not num_steps:
        raise RuntimeError("the requests did not run at once")
    gaps = [gave.gap_us for gave in inside[0]]
    return {
        **speed(num_tokens, end - start),
        "seconds": (end - start) / num_steps,
        "steps": num_steps,
        "gap": (gaps[-1] - gaps[0]) / 1e6 / max(1, num_steps - 1),
    }


def speed(num_tokens: int, seconds: float) -> dict[str, float]:
    return {"tokens": num_tokens, "seconds": seconds, "tokens_per_second": num_tokens / seconds}


def steadily(harness: EngineHarness, requests: list[EngineRequest]) -> dict[str, float]:
    """What a step takes while all of these run."""
    with uncollected():
        return step_of(harness.run(requests))


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """The garbage collector does not go through what was loaded meanwhile."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
