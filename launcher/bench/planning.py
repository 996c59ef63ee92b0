"""From the command line to requests. A setting that would have no effect is rejected before anything is sent."""

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from lorikeet.launcher.bench import draws, workload
from lorikeet.launcher.bench.result import LATENCIES

NUM_PROMPTS = 100
"""Requests where neither the command line nor the dataset says fewer."""
_LEAST = {"num_prompts": 1, "num_prefixes": 1, "prefix_len": 0, "num_warmups": 0, "max_concurrency": 1}
_OF_PROMPTS = ("input_len", "prefix_len", "num_prefixes", "tokenizer")
"""How prompts are made."""


def plan(given: argparse.Namespace) -> list[workload.Planned]:
    """The requests of a command line. Raises ValueError with a sentence, or OSError."""
    for name, least in _LEAST.items():
        if (value := getattr(given, name)) is not None and value < least:
            raise ValueError(f"{_flag(name)} must be at least {least}")
    if not given.request_rate > 0 or (given.burstiness is not None and not given.burstiness > 0):
        raise ValueError("--request-rate and --burstiness must be above 0")
    names = _names(given.adapters)
    if given.adapters and not names:
        raise ValueError(f"--adapters {given.adapters} names no adapter")
    if sentence := next(_without_effect(given), None):
        raise ValueError(sentence)
    shape = workload.Shape(
        NUM_PROMPTS if given.num_prompts is None else given.num_prompts,
        given.input_len or draws.Length.read("128"),
        given.output_len or draws.Length.read("64"),
        given.prefix_len or 0,
        given.num_prefixes or 1,
        names,
        given.adapter_distribution or "zipf",
        1.0 if given.zipf_exponent is None else given.zipf_exponent,
        given.request_rate,
        1.0 if given.burstiness is None else given.burstiness,
        given.seed,
    )
    if given.dataset is None:
        return workload.drawn(shape, None if given.tokenizer is None else _counter(given.tokenizer))
    rows = workload.rows(given.dataset, shape.num_requests)
    if sentence := next(_without_effect_on(rows, given), None):
        raise ValueError(sentence)
    return workload.read(rows, shape)


def check_latencies(shown: Sequence[str], planned: Sequence[workload.Planned], max_concurrency: int | None) -> None:
    """Whether a load measures the kinds of --percentile-metrics. Raises ValueError with a sentence."""
    if unknown := set(shown) - set(LATENCIES):
        raise ValueError(f"--percentile-metrics has {', '.join(sorted(unknown))}: choose of {', '.join(LATENCIES)}")
    for name in ("client_queue_time", "e2el_including_client_queue"):
        if name in shown and max_concurrency is None:
            raise ValueError(f"--percentile-metrics {name} needs --max-concurrency: without it no request waits here")
    if "e2el_including_client_queue" in shown and all(each.at == 0 for each in planned):
        raise ValueError(
            "--percentile-metrics e2el_including_client_queue needs --request-rate, or a dataset with `at`: the "
            "clients of a closed loop send when they can"
        )


def summary(planned: Sequence[workload.Planned]) -> str:
    """How many requests there are, and for how many adapters."""
    names = {each.adapter for each in planned} - {None}
    return f"{len(planned)} requests" + (f" with {len(names)} adapters" if names else "")


def _without_effect(given: argparse.Namespace) -> Iterator[str]:
    """A sentence for each setting that the others make useless."""
    if given.dataset is not None:
        for name in _OF_PROMPTS:
            if getattr(given, name) is not None:
                yield f"{_flag(name)} has no effect with --dataset, which has the prompts: leave it out"
    if given.num_prefixes is not None and not given.prefix_len:
        yield "--num-prefixes has no effect without --prefix-len: give that, or leave it out"
    if given.burstiness is not None and math.isinf(given.request_rate):
        yield "--burstiness has no effect without --request-rate: give that, or leave it out"
    yield from _adapters_without_effect(given)
    if given.save_texts and given.result is None:
        yield "--save-texts has no effect without --result: give that, or leave it out"
    if given.label and given.result is None and given.html is None:
        yield "--label has no effect without --result or --html: give one, or leave it out"


def _adapters_without_effect(given: argparse.Namespace) -> Iterator[str]:
    distribution = given.adapter_distribution
    if distribution == "trace":
        if given.dataset is None:
            yield "--adapter-distribution trace needs --dataset, whose lines name adapters"
        if given.adapters:
            yield "--adapters has no effect with --adapter-distribution trace: leave one of them out"
    elif distribution is not None and not given.adapters:
        yield f"--adapter-distribution {distribution} has no effect without --adapters: give that, or leave it out"
    if given.zipf_exponent is not None and (not given.adapters or distribution not in (None, "zipf")):
        yield "--zipf-exponent has no effect without --adapters by zipf: leave it out"


def _without_effect_on(rows: workload.Rows, given: argparse.Namespace) -> Iterator[str]:
    """The same for settings that the dataset makes useless, and for what it does not have."""
    path, has = given.dataset, {name: [name in row for row in rows] for name in ("output_tokens", "at")}
    if given.num_prompts is not None and len(rows) < given.num_prompts:
        yield f"{path} has {len(rows)} requests: give --num-prompts {len(rows)} or fewer, or leave it out to send all"
    if given.output_len is not None and all(has["output_tokens"]):
        yield f"--output-len has no effect, because each request of {path} has `output_tokens`: leave it out"
    if not math.isinf(given.request_rate) and all(has["at"]):
        yield f"--request-rate has no effect, because each request of {path} has `at`: leave it out"
    is_named = any(row.get("adapter") is not None for row in rows)
    if is_named and given.adapters:
        yield f"{path} names adapters, and --adapters does as well: leave that out, or remove `adapter` from the file"
    if not is_named and given.adapter_distribution == "trace":
        yield f"--adapter-distribution trace has no effect, because {path} names no adapter: leave it out"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _names(text: str) -> tuple[str, ...]:
    if text.startswith("@"):
        text = ",".join(Path(text[1:]).read_text().split())
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _counter(folder: str) -> workload.Count:
    import tokenizers

    path = Path(folder) / "tokenizer.json" if Path(folder).is_dir() else Path(folder)
    if not path.is_file():
        raise ValueError(f"--tokenizer {folder} is not a folder with tokenizer.json")
    loaded = tokenizers.Tokenizer.from_file(str(path))
    return lambda text: len(loaded.encode(text).ids)
