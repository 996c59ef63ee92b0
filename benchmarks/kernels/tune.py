"""Searches the best configurations of the kernels for adapters and heads on the GPU at hand, and writes the file that
shards read at start (shard/model/kernels/tuning.py).

Takes the shapes of the models' linears (by default those of Llama 3.1 8B), tries every configuration over several ranks
and numbers of tokens, drops those that differ from the specification anywhere and keeps the fastest: the least
geometric mean of its times over those of the built-in configuration. One is chosen for a module's size and dtype, never
for a step: a row's bits must not change with the batch. Prints a table and one line of JSON. Times are taken on CUDA
only: `--smoke` with TRITON_INTERPRET=1 checks candidates for two tiny shapes on CPU, and writes the built-in
configuration.

    python -m benchmarks.kernels.tune [MODEL…]
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from triton.runtime.errors import OutOfResources

from benchmarks.cuda.setup import LLAMA_8B
from benchmarks.evidence import arguments
from benchmarks.kernels import trials
from benchmarks.kernels.trials import Trial
from lorikeet.shard.model.kernels import tuning

Key = tuple[str, int, torch.dtype]

SPACE: dict[str, dict[str, tuple[int, ...]]] = {
    "shrink": {"DEPTH": (64, 128, 256), "SPLITS": (4, 8, 16, 32), "num_warps": (1, 2, 4), "num_stages": (2, 3, 4)},
    "expand": {"WIDTH": (32, 64, 128, 256), "num_warps": (1, 2, 4, 8), "num_stages": (1,)},
    "head_block": {"WIDTH": (16, 32, 64), "DEPTH": (64, 128, 256), "num_warps": (1, 2, 4), "num_stages": (2, 3, 4, 5)},
    "head_logits": {"WIDTH": (32, 64, 128), "DEPTH": (64, 128, 256), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4)},
}
"""What is tried, by kernel."""
RANKS, TOKENS = (8, 16, 64, 128), (1, 16, 64, 256)
MAX_ROWS = {"head_block": 32, "head_logits": 4}
"""Rows of a step with heads; half as many slots, and an output matrix is a gigabyte."""
FLUSHED_BYTES = 256 << 20
"""Written between two launches, more than a GPU's cache holds: in a step, the base's weights pass between them."""


@dataclass(frozen=True)
class Shapes:
    """Shapes of one model's products."""

    linears: tuple[tuple[int, int], ...]
    """Inputs and outputs of each."""
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True)
class TunedKernel:
    """The best configuration of one entry."""

    kernel: str
    size: int
    values: list[int]
    ratio: float
    """Its times over those of the built-in one, geometric mean."""
    num_tried: int
    num_wrong: int
    """Candidates that the GPU has no room for, or that differ from the specification."""


def llama_8b() -> LlamaConfig:
    """Configuration of Llama 3.1 8B, as far as it has to do with shapes; layers are alike."""
    return LlamaConfig(**replace(LLAMA_8B, layers=1).config())


def shapes_of(config: object) -> Shapes:
    """The linears of a model with this configuration, from its skeleton."""
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    sizes = {(module.in_features, module.out_features) for module in network.modules() if isinstance(module, nn.Linear)}
    head = network.get_output_embeddings()
    return Shapes(tuple(sorted(sizes)), head.in_features, head.out_features)


SMOKE = Shapes(((24, 20), (40, 24)), 24, 40)


class Search:
    """Over the configurations of one GPU."""

    def __init__(self, device: torch.device, dtype: torch.dtype, repeats: int, is_smoke: bool) -> None:
        self.entries: dict[Key, list[int]] = {}
        """What is in use, the best so far or the candidate at hand."""
        self._tuned = tuning.Tuned(self.entries)
        self._device, self._dtype, self._repeats = device, dtype, repeats
        self._ranks: Sequence[int] = (3,) if is_smoke else RANKS
        self._tokens: Sequence[int] = (2,) if is_smoke else TOKENS
        self._is_smoke = is_smoke
        self._flushed = torch.empty(0 if is_smoke else FLUSHED_BYTES, dtype=torch.uint8, device=device)

    def run(self, shapes: Shapes, kernels: Sequence[str]) -> Iterator[TunedKernel]:
        """One entry after the other; what expand is tried with is the best of shrink."""
        for kernel in kernels:
            if kernel in ("shrink", "expand"):
                side = 0 if kernel == "shrink" else 1
                for size in sorted({shape[side] for shape in shapes.linears}):
                    # the smallest other side, so that this kernel is most of the time
                    shape = min((shape for shape in shapes.linears if shape[side] == size), key=lambda s: s[1 - side])
                    yield self._best((kernel, size, self._dtype), shape)
            else:
                yield self._best((kernel, shapes.hidden_size, self._dtype), (shapes.hidden_size, shapes.vocab_size))

    def _best(self, key: Key, shape: tuple[int, int]) -> TunedKernel:
        """shape: inputs and outputs of the module that it is tried on."""
        built_in = list(tuning.BUILT_IN[key[0]].values())
        trials = list(self._trials(key, shape))
        self.entries[key] = built_in
        built_in_times = self._times(trials)
        if built_in_times is None:
            raise RuntimeError(f"{key[0]} of {key[1]}: the built-in configuration differs from the specification")
        best, least, num_tried, num_wrong = built_in, 1.0, 0, 0
        for values in self._candidates(key[0]):
            self.entries[key] = values
            times = self._times(trials)
            num_tried += 1
            if times is None:
                num_wrong += 1
                continue
            ratio = math.exp(sum(math.log(a / b) for a, b in zip(times, built_in_times, strict=True)) / len(times))
            if ratio < least:
                best, least = values, ratio
        self.entries[key] = best
        return TunedKernel(key[0], key[1], best, least, num_tried, num_wrong)

    def _trials(self, key: Key, shape: tuple[int, int]) -> Iterator[Trial]:
        kernel = key[0]
        if kernel in ("shrink", "expand"):
            for rank, num_tokens in product(self._ranks, self._tokens):
                yield trials.of_adapters(key, shape, rank, num_tokens, self._tuned, self._device)
            return
        max_rows = MAX_ROWS[kernel]
        for num_rows in sorted({min(count, max_rows) for count in self._tokens}):
            if kernel == "head_block":
                yield trials.of_drafts(key, num_rows, self._tuned, self._device)
            else:
                yield trials.of_answers(key, shape[1], num_rows, self._tuned, self._device)

    def _candidates(self, kernel: str) -> Iterator[list[int]]:
        names = tuning.BUILT_IN[kernel]
        choices = [SPACE[kernel][name][: 1 if self._is_smoke else None] for name in names]
        for values in product(*choices):
            yield tuning.check(kernel, dict(zip(names, values, strict=True)), f"{kernel} as it is tried")

    def _times(self, trials: Sequence[Trial]) -> list[float] | None:
        """Seconds of each trial; None if any of them is wrong, or too large for the GPU."""
        try:
            if not all(trial.is_right() for trial in trials):
                return None
        except OutOfResources:
            return None
        return [self._time(trial.launch) for trial in trials]

    def _time(self, launch: Callable[[], torch.Tensor]) -> float:
        """The median of one launch, by a captured graph: a shard's step is one too. No number without CUDA."""
        if self._device.type != "cuda":
            return math.nan
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self._repeats)]
        for begin, end in marks:
            self._flushed.zero_()
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize(self._device)
        return sorted(begin.elapsed_time(end) / 1000 for begin, end in marks)[len(marks) // 2]


def report(results: Sequence[TunedKernel], gpu: str) -> None:
    print(f"{gpu}\n{'kernel':<8} {'size':>7} {'times':>6} {'tried':>6} {'dropped':>8}  configuration")
    for result in results:
        named = " ".join(f"{k}={v}" for k, v in zip(tuning.BUILT_IN[result.kernel], result.values, strict=True))
        counts = f"{result.num_tried:>6} {result.num_wrong:>8}"
        print(f"{result.kernel:<8} {result.size:>7} {result.ratio:>6.2f} {counts}  {named}")
    print(json.dumps({"gpu": gpu, "results": [asdict(result) for result in results]}))


@torch.inference_mode()
def main(words: Sequence[str] | None = None) -> int:
    parser = arguments.parser(__doc__)
    parser.add_argument("models", nargs="*", help="folders with a config.json; Llama 3.1 8B's shapes if none")
    parser.add_argument("--kernels", nargs="+", choices=list(SPACE), default=list(SPACE))
    parser.add_argument("--dtype", choices=list(tuning.DTYPES.values()), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="where to write; the GPU's file in the package if not given")
    parser.add_argument("--smoke", action="store_true", help="two tiny shapes, on CPU with TRITON_INTERPRET=1")
    options = parser.parse_args(words)
    if options.smoke and (options.out is None or os.environ.get("TRITON_INTERPRET") != "1"):
        parser.error("--smoke needs --out and TRITON_INTERPRET=1")
    if not options.smoke and not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    device = torch.device("cpu" if options.smoke else "cuda")
    gpu = "smoke" if options.smoke else torch.cuda.get_device_name(device)
    path: Path = options.out or tuning.FOLDER / tuning.file_name(gpu)
    # what is known of other models stays
    known = tuning.parse(path.read_text(), gpu, path.name) if path.exists() else {}
    configs = [AutoConfig.from_pretrained(model) for model in options.models] or [llama_8b()]
    dtype = next(dtype for dtype, name in tuning.DTYPES.items() if name == options.dtype)
    search = Search(device, dtype, options.repeats, options.smoke)
    results: list[TunedKernel] = []
    for shapes in [SMOKE] if options.smoke else map(shapes_of, configs):
        for result in search.run(shapes, [kernel for kernel in SPACE if kernel in options.kernels]):
            results.append(result)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(tuning.write(known | search.entries, gpu))  # as it goes: the search is long
    report(results, gpu)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
