"""How long one forward pass takes against what this machine could do at best: decode and prefill of a random model.

`python -m benchmarks.step` prints one table for people and one JSON line last. Knows the model alone: no scheduling,
sampling or wire.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lorikeet.shard.batch.inputs import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import Model, load_model
from lorikeet.shard.model.fusion.layer import FusedDecoderLayer
from lorikeet.shard.model.fusion.parts import FusedMlp
from lorikeet.shard.model.kernels.packing import StreamedMatrix, pack


@dataclass(frozen=True)
class Machine:
    """What the machine gives at best."""

    bytes_per_second: float
    flops_per_second: float


def best_of(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls, after one to warm up."""
    call()
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


def measure_machine() -> Machine:
    """Best read of 1 GiB and best packed bfloat16 product."""
    memory = torch.ones(1 << 28)
    seconds = best_of(memory.sum, 5)
    shapes = ((256, 1024, 5632), (1024, 1024, 5632), (256, 2816, 1024))
    rates = []
    for rows, inner, outer in shapes:
        x, weight = torch.randn(rows, inner).bfloat16(), pack(torch.randn(outer, inner).bfloat16(), None)
        rates.append(2 * rows * inner * outer / best_of(lambda x=x, w=weight: w(x), 20))  # type: ignore[misc]
    return Machine(memory.nbytes / seconds, max(rates))


def make_model(folder: Path, attention: str) -> Model:
    """A random Llama of about 200 M parameters in bfloat16."""
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=8192, max_position_embeddings=4096, tie_word_embeddings=False, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return load_model(ShardConfig("random", str(folder), "unix:/dev/null", attention=attention))


def segments_of(model: Model, decodes: int, kv_len: int, prefills: int, prompt: int) -> list[Segment]:
    """A step of `decodes` running requests and `prefills` fresh prompts, each on pages of its own."""
    pages = -(-max(kv_len + 1, prompt) // model.page_size)
    shares = [(kv_len, 1)] * decodes + [(0, prompt)] * prefills
    return [Segment(start, count, range(i * pages, (i + 1) * pages)) for i, (start, count) in enumerate(shares)]


def time_step(model: Model, segments: list[Segment], repeats: int) -> float:
    """Seconds of one fill and forward."""
    tokens = sum(segment.num_tokens for segment in segments)
    model.allocate_kv(max(segment.page_ids[-1] for segment in segments) + 1)
    ids = torch.randint(0, model.info.vocab_size, (tokens,))
    rows = torch.tensor([segment.num_tokens for segment in segments]).cumsum(0) - 1

    def step() -> torch.Tensor:
        model.inputs.fill(segments, ids, rows)
        return model.forward()

    return best_of(step, repeats)


def share_outside(model: Model, segments: list[Segment]) -> float:
    """ScheduledRequest of a step that is neither a matrix product nor attention.

    These are timed while layers run part by part, since a fused layer is one call; the step is timed as it is served.
    """
    inside = 0.0

    def timed(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*arguments: object) -> torch.Tensor:
            nonlocal inside
            started = time.perf_counter()
            result = call(*arguments)
            inside += time.perf_counter() - started
            return result

        return run

    def part_by_part(layer: FusedDecoderLayer, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        return layer.one_by_one(hidden_states, **options)

    with ExitStack() as stack:
        stack.enter_context(patch.object(FusedDecoderLayer, "forward", part_by_part))
        for kind, name in ((StreamedMatrix, "__call__"), (FusedMlp, "forward"), (type(model.backend), "attend")):
            stack.enter_context(patch.object(kind, name, timed(getattr(kind, name))))
        time_step(model, segments, 1)
        inside = 0.0
        for _ in range(5):
            model.forward()
    started = time.perf_counter()
    for _ in range(5):
        model.forward()
    return 1 - inside / (time.perf_counter() - started)


CASES = {
    "decode 1": (1, 0), "decode 8": (8, 0), "decode 32": (32, 0), "prefill 256": (0, 1), "prefill 8x256": (0, 8),
    "decode 7 + prefill 256": (7, 1),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-len", type=int, default=288)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--case", choices=CASES, help="only this one")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model = make_model(Path(folder), options.attention)
        machine = measure_machine()
        matrix = sum(p.numel() for p in model.network.parameters())  # norms and embeddings stay parameters
        matrix = model.info.num_parameters - matrix
        print(f"read {machine.bytes_per_second / 1e9:.1f} GB/s, bf16 {machine.flops_per_second / 1e9:.0f} GFLOP/s")
        results = {}
        for name, (decodes, prefills) in CASES.items():
            if options.case not in (None, name):
                continue
            segments = segments_of(model, decodes, options.kv_len, prefills, options.prompt)
            tokens = sum(segment.num_tokens for segment in segments)
            kv_bytes = decodes * options.kv_len * model.page_bytes / model.page_size
            reading = (2 * matrix + kv_bytes) / machine.bytes_per_second
            ideal = max(reading, 2 * tokens * matrix / machine.flops_per_second)
            seconds = time_step(model, segments, options.repeats)
            results[name] = {
                "ms": round(seconds * 1e3, 2),
                "ideal_ms": round(ideal * 1e3, 2),
                "share": round(ideal / seconds, 3),
            }
            outside = share_outside(model, segments)
            results[name]["outside"] = round(outside, 3)
            print(
                f"{name:24} {seconds * 1e3:8.2f} ms   ideal {ideal * 1e3:8.2f} ms   {ideal / seconds:.2f}   "
                f"{outside:.1%} outside matrix products and attention"
            )
        print(json.dumps({"threads": options.threads, "torch": torch.__version__, "cases": results}))


if __name__ == "__main__":
    main()
