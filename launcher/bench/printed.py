"""The block that `vllm bench serve` prints, with the lines of adapters and drafts."""

from collections.abc import Iterator, Sequence
from typing import Any

from lorikeet.launcher.bench.result import LATENCIES, Result, percentile_word

WIDTH = 50
_HEADINGS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
    "client_queue_time": "Client-side Queueing",
    "e2el_including_client_queue": "Queue-inclusive End-to-end Latency",
}
_SHOWN_ADAPTERS = 5


def block(result: Result, latencies: Sequence[str], percentiles: Sequence[float]) -> str:
    """The printed text; `latencies` are the kinds of latency in it."""
    return "\n".join(_lines(result, latencies, percentiles))


def _lines(result: Result, latencies: Sequence[str], percentiles: Sequence[float]) -> Iterator[str]:
    yield f"{' Serving Benchmark Result ':=^{WIDTH}}"
    yield _line("Successful requests:", result["completed"])
    yield _line("Failed requests:", result["failed"])
    if result.get("max_concurrency") is not None:
        yield _line("Maximum request concurrency:", result["max_concurrency"])
    if isinstance(result.get("request_rate"), float):
        yield _line("Request rate configured (RPS):", result["request_rate"])
    yield _line("Benchmark duration (s):", result["duration"])
    yield _line("Total input tokens:", result["total_input_tokens"])
    yield _line("Total generated tokens:", result["total_output_tokens"])
    yield _line("Request throughput (req/s):", result["request_throughput"])
    if result["request_goodput"] is not None:
        yield _line("Request goodput (req/s):", result["request_goodput"])
    yield _line("Output token throughput (tok/s):", result["output_throughput"])
    yield _line("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"])
    yield _line("Peak concurrent requests:", float(result["max_concurrent_requests"]))
    yield _line("Total token throughput (tok/s):", result["total_token_throughput"])
    for name in latencies:
        label = LATENCIES[name]
        yield f"{_HEADINGS[name]:-^{WIDTH}}"
        yield _line(f"Mean {label} (ms):", result[f"mean_{name}_ms"])
        yield _line(f"Median {label} (ms):", result[f"median_{name}_ms"])
        for percentile in map(percentile_word, percentiles):
            yield _line(f"P{percentile} {label} (ms):", result[f"p{percentile}_{name}_ms"])
    yield from _speculation(result)
    yield from _ours(result["lorikeet"], result["backend"])
    yield "=" * WIDTH


def _speculation(result: Result) -> Iterator[str]:
    if "spec_decode_num_drafts" not in result:
        return
    yield f"{'Speculative Decoding':-^{WIDTH}}"
    yield _line("Acceptance rate (%):", result["spec_decode_acceptance_rate"])
    yield _line("Acceptance length:", result["spec_decode_acceptance_length"])
    yield _line("Drafts:", result["spec_decode_num_drafts"])
    yield _line("Draft tokens:", result["spec_decode_draft_tokens"])
    yield _line("Accepted tokens:", result["spec_decode_accepted_tokens"])
    if rates := result["spec_decode_per_position_acceptance_rates"]:
        yield "Per-position acceptance (%):"
        for position, rate in enumerate(rates):
            yield _line(f"  Position {position}:", 100 * rate)


def _ours(ours: Result, api: str) -> Iterator[str]:
    if ours["tiers"]:
        yield f"{'Time to First Token by Adapter Tier':-^{WIDTH}}"
        for tier, values in ours["tiers"].items():
            yield _line(f"Median TTFT, {tier} (ms), {values['requests']} requests:", values["median_ttft_ms"])
            yield _line(f"P99 TTFT, {tier} (ms):", values["p99_ttft_ms"])
    if (fairness := ours["fairness"]) is not None:
        yield f"{'Fairness across Adapters':-^{WIDTH}}"
        yield _line("Adapters:", fairness["adapters"])
        yield _line("Jain index of tokens/s per request:", fairness["jain_index_of_speed"])
        yield _line("Slowest over mean tokens/s:", fairness["slowest_over_mean_speed"])
        yield _line("Worst over median TTFT:", fairness["worst_over_median_ttft"])
        for name, values in list(ours["adapters"].items())[:_SHOWN_ADAPTERS]:
            yield _line(f"Median TTFT, {name[:20]} (ms), {values['requests']} req.:", values["median_ttft_ms"])
    if (sources := ours["sources"]) is not None:
        yield f"{'Tokens per Step by Source':-^{WIDTH}}"
        for name, value in sources["tokens_per_step"].items():
            yield _line(f"{name}:", value)
        yield _line("Together:", sum(sources["tokens_per_step"].values()))
    else:
        yield f"{'Tokens per Step by Source':-^{WIDTH}}"
        yield "The server names no source." if api == "lorax" else "Measured with --api lorax only."
    yield f"{'Client':-^{WIDTH}}"
    yield _line("Client CPU (s):", ours["client_cpu_seconds"])
    yield _line("Client CPU (% of one core):", 100 * ours["client_cpu_share"])


def _line(label: str, value: Any) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"
