"""What a load measured: the numbers of `vllm bench serve` under its keys, and those of adapters and drafts."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lorikeet.launcher.bench.load import ConnectionPool, LoadResult, Sample
from lorikeet.launcher.bench.workload import Planned
from lorikeet.launcher.cli.metrics_page import Page

LATENCIES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2el": "E2EL",
    "client_queue_time": "Client Queue Time",
    "e2el_including_client_queue": "E2EL incl. Client Queue",
}
ALWAYS = ("ttft", "tpot", "itl", "e2el")
"""Latencies that every result has; the others only if they are asked for, as in vLLM."""
OBJECTIVES = ("ttft", "tpot", "e2el")
"""What goodput can be measured by."""
BASE = "(base model)"

Result = dict[str, Any]


def goals(words: Sequence[str]) -> dict[str, float]:
    """Objectives such as `ttft:200`, in milliseconds. Raises ValueError with a sentence."""
    limits: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if name not in OBJECTIVES or not limits[name] >= 0:
            raise ValueError(
                f"{word!r} is not an objective: write {', '.join(f'{objective}:200' for objective in OBJECTIVES)}"
            )
    return limits


def measured(
    loaded: LoadResult, percentiles: Sequence[float], objectives: Mapping[str, float], latencies: Sequence[str] = ()
) -> Result:
    """The numbers of one load; `latencies` are kinds of latency."""
    good = [sample for sample in loaded.samples if not sample.error]
    duration, num_input = loaded.duration, sum(sample.num_prompt for sample in good)
    num_output = sum(sample.num_output for sample in good)
    peak, concurrent = _peaks(good)
    result: Result = {
        "duration": duration,
        "completed": len(good),
        "failed": len(loaded.samples) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration,
        "request_goodput": _num_good(good, objectives) / duration if objectives else None,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_output_tokens_per_s": peak,
        "max_concurrent_requests": concurrent,
    }
    for name, values in series(good).items():
        if name in ALWAYS or name in latencies:
            result |= _spread(name, values, percentiles)
    return result | {"lorikeet": _ours(loaded, good)} | _arrays(loaded.samples)


def series(good: Sequence[Sample]) -> dict[str, list[float]]:
    """Seconds by kind of latency."""
    return {
        "ttft": [sample.ttft for sample in good],
        "tpot": [sample.tpot for sample in good if sample.num_output > 1],
        "itl": [gap for sample in good for gap in sample.itls],
        "e2el": [sample.latency for sample in good],
        "client_queue_time": [sample.queue_time for sample in good],
        "e2el_including_client_queue": [sample.latency + sample.queue_time for sample in good],
    }


def percentile_word(percentile: float) -> str:
    """A percentile as in vLLM's keys: p99, p99.9."""
    return f"{percentile:g}"


def _spread(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> Result:
    # [number of values]
    values = np.asarray(seconds or [0.0]) * 1000
    result: Result = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    for percentile in percentiles:
        result[f"p{percentile_word(percentile)}_{name}_ms"] = float(np.percentile(values, percentile))
    return result


def _num_good(good: Sequence[Sample], objectives: Mapping[str, float]) -> int:
    """Requests that met every objective."""
    return sum(
        all(1000 * getattr(sample, {"e2el": "latency"}.get(name, name)) <= limit for name, limit in objectives.items())
        for sample in good
    )


def _peaks(good: Sequence[Sample]) -> tuple[float, int]:
    """Events with tokens in the busiest second, and the most requests at one time."""
    seconds: Counter[int] = Counter()
    changes: list[tuple[float, int]] = []
    for sample in good:
        time_s = sample.start + sample.ttft
        for gap in [0.0, *sample.itls]:
            time_s += gap
            seconds[int(time_s)] += 1
        changes += [(sample.start, 1), (sample.start + sample.latency, -1)]
    running = max_running = 0
    for _, change in sorted(changes):
        running += change
        max_running = max(max_running, running)
    return float(max(seconds.values(), default=0)), max_running


def _arrays(samples: Sequence[Sample]) -> Result:
    return {
        "input_lens": [sample.num_prompt for sample in samples],
        "output_lens": [sample.num_output for sample in samples],
        "ttfts": [sample.ttft for sample in samples],
        "itls": [sample.itls for sample in samples],
        "latencies": [sample.latency for sample in samples],
        "start_times": [sample.start for sample in samples],
        "queue_times": [sample.queue_time for sample in samples],
        "generated_texts": [sample.text for sample in samples],
        "errors": [sample.error for sample in samples],
    }


ARRAYS = tuple(_arrays([]))
"""Keys with one value per request."""


def _ours(loaded: LoadResult, good: Sequence[Sample]) -> Result:
    """What vLLM's benchmark does not have."""
    return {
        "client_cpu_seconds": loaded.client_cpu_s,
        "client_cpu_share": loaded.client_cpu_s / (loaded.duration * loaded.num_processes),
        "tiers": _by_tier(good),
        "fairness": _fairness(good),
        "adapters": _by_adapter(good),
        "sources": _by_source(good),
        "request_adapters": [sample.planned.adapter for sample in loaded.samples],
        "request_tiers": [sample.tier for sample in loaded.samples],
    }


def _by_tier(good: Sequence[Sample]) -> Result:
    """Time to first token by the tier that held the adapter."""
    ttfts: dict[str, list[float]] = {}
    for sample in good:
        if sample.tier:
            ttfts.setdefault(sample.tier, []).append(sample.ttft)
    return {tier: {"requests": len(values), **_spread("ttft", values, [99])} for tier, values in sorted(ttfts.items())}


def _grouped(good: Sequence[Sample]) -> dict[str, list[Sample]]:
    """By adapter, the most requested first."""
    groups: dict[str, list[Sample]] = {}
    for sample in good:
        groups.setdefault(sample.planned.adapter or BASE, []).append(sample)
    return dict(sorted(groups.items(), key=lambda pair: -len(pair[1])))


def _by_adapter(good: Sequence[Sample]) -> Result:
    return {
        name: {
            "requests": len(samples),
            "output_tokens": sum(sample.num_output for sample in samples),
            "median_ttft_ms": 1000 * float(np.median([sample.ttft for sample in samples])),
            "median_e2el_ms": 1000 * float(np.median([sample.latency for sample in samples])),
            "tokens_per_second": _speed(samples),
        }
        for name, samples in _grouped(good).items()
    }


def _speed(samples: Sequence[Sample]) -> float:
    """Output tokens over the time that these requests took, added up: what a user of the adapter sees."""
    return sum(sample.num_output for sample in samples) / max(sum(sample.latency for sample in samples), 1e-9)


def _fairness(good: Sequence[Sample]) -> Result | None:
    """How equal adapters are served; None for fewer than two."""
    groups = list(_grouped(good).values())
    if len(groups) < 2:
        return None
    # [number of adapters]
    speeds = np.array([_speed(samples) for samples in groups])
    ttfts = np.array([np.median([sample.ttft for sample in samples]) for samples in groups])
    return {
        "adapters": len(groups),
        "jain_index_of_speed": float(speeds.sum() ** 2 / (len(speeds) * (speeds**2).sum())),
        "slowest_over_mean_speed": float(speeds.min() / speeds.mean()),
        "worst_over_median_ttft": float(ttfts.max() / max(float(np.median(ttfts)), 1e-9)),
    }


def _by_source(good: Sequence[Sample]) -> Result | None:
    """Output tokens and tokens per step by what proposed them; None if the server does not say."""
    steps = sum(sample.num_steps for sample in good)
    total: Counter[str] = sum((sample.sources for sample in good), Counter())
    if not steps:
        return None
    per_step = {name: count / steps for name, count in total.most_common()}
    return {"steps": steps, "tokens": dict(total.most_common()), "tokens_per_step": per_step}


_NAMES = {
    "num_drafts": ("lorikeet_speculation_steps_total", "vllm:spec_decode_num_drafts_total"),
    "draft_tokens": ("lorikeet_drafted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
    "accepted_tokens": ("lorikeet_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
}
_BY_POSITION = (
    "lorikeet_speculation_accepted_tokens_per_position_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
)


@dataclass(frozen=True)
class SpeculationCounts:
    """Speculation counters of a metrics page at one moment."""

    totals: Mapping[str, float]
    by_position: Mapping[int, float]
    """Accepted tokens by position in the step, from 0; no positions if none was accepted."""

    @classmethod
    def read(cls, page: Page) -> "SpeculationCounts":
        """Raises ValueError for a position that is no number."""
        totals = {key: page.total(_first(page, names)) for key, names in _NAMES.items()}
        by_position = page.by(_first(page, _BY_POSITION), "position")
        return cls(totals, {int(position): number for position, number in by_position.items()})


def _first(page: Page, names: tuple[str, ...]) -> str:
    """The one that the server has: the numbers of both would count twice."""
    return next((name for name in names if name in page.samples), names[0])


async def counts(connections: ConnectionPool) -> SpeculationCounts | None:
    """The counters; None if the server shows none."""
    try:
        response = await connections.get("/metrics")
    except (OSError, ValueError, TimeoutError):
        return None
    if response.status != 200:
        return None
    try:
        return SpeculationCounts.read(Page.read(response.body.decode(), 0.0))
    except ValueError:
        return None


def rates(first: SpeculationCounts | None, after: SpeculationCounts | None) -> dict[str, Any]:
    """vLLM's keys; empty if nothing was drafted in between."""
    if first is None or after is None:
        return {}
    grown = {key: after.totals[key] - first.totals[key] for key in _NAMES}
    if grown["num_drafts"] <= 0 or grown["draft_tokens"] <= 0:
        return {}
    positions = range(max(after.by_position, default=-1) + 1)
    accepted = (after.by_position.get(position, 0.0) - first.by_position.get(position, 0.0) for position in positions)
    return {
        "spec_decode_acceptance_rate": 100 * grown["accepted_tokens"] / grown["draft_tokens"],
        "spec_decode_acceptance_length": 1 + grown["accepted_tokens"] / grown["num_drafts"],
        "spec_decode_num_drafts": round(grown["num_drafts"]),
        "spec_decode_draft_tokens": round(grown["draft_tokens"]),
        "spec_decode_accepted_tokens": round(grown["accepted_tokens"]),
        "spec_decode_per_position_acceptance_rates": [number / grown["num_drafts"] for number in accepted],
    }


def check_latencies(latencies: Sequence[str], planned: Sequence[Planned], max_concurrency: int | None) -> None:
    """Whether a load measures the kinds of --percentile-metrics. Raises ValueError with a sentence."""
    if unknown := set(latencies) - set(LATENCIES):
        raise ValueError(f"--percentile-metrics has {', '.join(sorted(unknown))}: choose from {', '.join(LATENCIES)}")
    for name in ("client_queue_time", "e2el_including_client_queue"):
        if name in latencies and max_concurrency is None:
            raise ValueError(f"--percentile-metrics {name} needs --max-concurrency: without it no request waits here")
    if "e2el_including_client_queue" in latencies and all(request.at == 0 for request in planned):
        raise ValueError(
            "--percentile-metrics e2el_including_client_queue needs --request-rate, or a dataset with `at`: the "
            "clients of a closed loop send when they can"
        )
