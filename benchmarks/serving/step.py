"""How long one forward pass takes against what this machine could do at best: decode and prefill of a random model.

Only the model runs: no scheduling, sampling or network. Prints a table and one line of JSON.

    python -m benchmarks.serving.step [--case NAME]
"""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.evidence import arguments
from benchmarks.models.limit import Machine
from benchmarks.models.random_llama import llama_200m
from benchmarks.serving.machine import best_of, best_read
from lorikeet.shard.batch.inputs import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import Model, load_model
from lorikeet.shard.model.fusion.layer import FusedDecoderLayer
from lorikeet.shard.model.fusion.parts import FusedMlp
from lorikeet.shard.model.kernels.packing import StreamedMatrix, pack

THREADS, KV_LEN, PROMPT, REPEATS = 2, 288, 256, 12


def measure_machine() -> Machine:
    """Best read of 1 GiB and best packed bfloat16 product."""
    rates = []
    for rows, inner, outer in ((256, 1024, 5632), (1024, 1024, 5632), (256, 2816, 1024)):
        x, weight = torch.randn(rows, inner).bfloat16(), pack(torch.randn(outer, inner).bfloat16(), None)
        rates.append(2 * rows * inner * outer / best_of(20, lambda x=x, w=weight: w(x)))  # type: ignore[misc]
    return Machine(flops=max(rates), bytes_per_s=best_read(5))


def segments_of(model: Model, decodes: int, prefills: int) -> list[Segment]:
    """A step of `decodes` running requests and `prefills` fresh prompts, each on pages of its own."""
    pages = -(-max(KV_LEN + 1, PROMPT) // model.page_size)
    shares = [(KV_LEN, 1)] * decodes + [(0, PROMPT)] * prefills
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

    return best_of(repeats, step)


def share_outside(model: Model, segments: list[Segment]) -> float:
    """Share of a step that is neither a matrix product nor attention.

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
        stack.enter_context(patch.object(model, "compiled", None))
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
    parser = arguments.parser(__doc__)
    parser.add_argument("--case", choices=CASES, help="only this one")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    with torch.inference_mode():
        model = load_model(ShardConfig("random", str(llama_200m()), "unix:/dev/null"))
        machine = measure_machine()
        # norms and embeddings stay parameters
        matrix = model.info.num_parameters - sum(p.numel() for p in model.network.parameters())
        print(f"read {machine.bytes_per_s / 1e9:.1f} GB/s, bf16 {machine.flops / 1e9:.0f} GFLOP/s")
        results = {}
        for name, (decodes, prefills) in CASES.items():
            if options.case not in (None, name):
                continue
            segments = segments_of(model, decodes, prefills)
            tokens = sum(segment.num_tokens for segment in segments)
            kv_bytes = decodes * KV_LEN * model.page_bytes / model.page_size
            ideal = max((2 * matrix + kv_bytes) / machine.bytes_per_s, 2 * tokens * matrix / machine.flops)
            seconds = time_step(model, segments, REPEATS)
            outside = share_outside(model, segments)
            results[name] = {"ms": 1e3 * seconds, "ideal_ms": 1e3 * ideal, "share": ideal / seconds, "outside": outside}
            print(
                f"{name:24} {seconds * 1e3:8.2f} ms   ideal {ideal * 1e3:8.2f} ms   {ideal / seconds:.2f}   "
                f"{outside:.1%} outside matrix products and attention"
            )
        print(json.dumps({"threads": THREADS, "torch": torch.__version__, "cases": results}))


if __name__ == "__main__":
    main()
