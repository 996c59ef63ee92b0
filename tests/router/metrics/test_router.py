"""Metrics in both forms: LoRAX's names and labels exactly, numbers that add up."""

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.metrics.groups import Histogram
from lorikeet.router.metrics.router import FORMER_NAMES, PROMETHEUS_TYPE, Metrics
from lorikeet.router.metrics.vllm import VllmMetrics
from lorikeet.router.shards.members import Reason

LORAX_COUNTERS = {
    "lorax_request_count",
    "lorax_request_success",
    "lorax_request_failure",
    "lorax_batch_inference_count",
    "lorax_batch_inference_success",
    "lorax_batch_inference_failure",
    "lorax_batch_concat",
}
LORAX_HISTOGRAMS = {
    "lorax_request_duration",
    "lorax_request_validation_duration",
    "lorax_request_queue_duration",
    "lorax_request_inference_duration",
    "lorax_request_mean_time_per_token_duration",
    "lorax_request_generated_tokens",
    "lorax_request_input_length",
    "lorax_request_max_new_tokens",
    "lorax_batch_inference_duration",
    "lorax_batch_next_size",
}
LORAX_SUMMARIES = {
    "lorax_request_skipped_tokens",
    "lorax_request_input_count",
    "lorax_request_classify_output_count",
}
LORAX_GAUGES = {"lorax_queue_length", "lorax_batch_current_size", "lorax_batch_current_max_tokens"}


def filled() -> Metrics:
    metrics = Metrics(max_input_length=1000, max_total_tokens=2000)
    metrics.request_arrived()
    metrics.request_arrived()
    metrics.request_succeeded(0.25)
    metrics.request_failed("validation")
    metrics.request_input_length.observe(15)
    metrics.request_skipped_tokens.observe(3)
    metrics.inter_token_latency.observe(0.0125, 4)
    metrics.set_info(pb.ShardInfo(page_size=16, num_pages=100))
    load = pb.Load(num_running=2, used_pages=5, cached_pages=7, num_preempted=1, step_ms=20, step_tokens=50)
    metrics.first_token(0.1, 0)
    metrics.steps.concatenated.add(1, "backpressure")
    metrics.record_output(pb.StepOutput(), 0)
    metrics.record_output(pb.StepOutput(step=1, load=load, outputs=[pb.RequestOutput()]), 2)
    return metrics


def samples(metrics: Metrics) -> dict[str, float]:
    """Every line that is not a comment, as a Prometheus server parses it."""
    lines = metrics.prometheus().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_a_snapshot_keeps_its_numbers() -> None:
    metrics = Metrics(vllm=VllmMetrics("model", 100, max_adapters=0))

    def count() -> None:
        metrics.request_failed("overloaded")
        metrics.request_succeeded(0.5)
        metrics.gauges["lorax_queue_length"] += 1
        metrics.adapters.loaded("disk", 0.25)
        drafted = pb.RequestOutput(token_ids=[5], sources=bytes([pb.SOURCE_LOOKUP]), step_ends=b"\1", num_drafted=[1])
        metrics.speculation.observe(drafted, 1, "")
        metrics.steps.count.add(1, "decode")
        assert metrics.vllm is not None
        metrics.vllm.latency.observe(0.5)

    count()
    before, snapshot = metrics.prometheus(), metrics.snapshot()
    count()
    assert snapshot.prometheus() == before != metrics.prometheus()


def test_idle_seconds_of_each_shard_are_added_up() -> None:
    metrics = filled()
    for index, gap_us in [(0, 400), (0, 1500), (1, 9000), (1, 9100), (0, 0), (0, 200)]:
        metrics.record_output(pb.StepOutput(load=pb.Load(gap_us=gap_us)), 0, index)
    assert samples(metrics)["lorikeet_device_idle_seconds_total"] == pytest.approx((1500 + 100 + 200) / 1e6)


def test_retries_placements_batches_and_idle_time_keep_their_former_names() -> None:
    metrics = filled()
    metrics.requests_retried.add(3)
    metrics.routing_decisions.add(2, "overflow")
    metrics.device_idle_seconds.add(0.5)
    metrics.batch_left(4)
    values = samples(metrics)
    assert values["lorikeet_requests_retried_total"] == values["lorikeet_requests_moved_total"] == 3
    assert values['lorikeet_routing_decisions_total{reason="overflow"}'] == 2
    assert values['lorikeet_placements_total{reason="spread"}'] == 2
    assert values["lorikeet_device_idle_seconds_total"] == values["lorikeet_step_gap_seconds_total"] == 0.5
    assert values['lorikeet_dispatch_batch_size_bucket{le="4"}'] == values['lorikeet_batch_sent_bucket{le="4"}'] == 1


def test_former_names_are_deprecated_copies() -> None:
    families = {family.name: family for family in filled().collect()}
    for name, former in FORMER_NAMES.items():
        assert families[former].documentation == f"Deprecated: {name} has the same numbers"
        assert families[former].type == families[name].type
        assert [sample.value for sample in families[former].samples] == [
            sample.value for sample in families[name].samples
        ]
        assert all(sample.name.startswith(former) for sample in families[former].samples)


def test_every_reason_for_a_shard_had_a_former_name() -> None:
    metrics = filled()
    for reason in Reason:
        metrics.routing_decisions.add(1, reason)
    reasons = {name.partition('"')[2].rstrip('"}') for name in samples(metrics) if "placements" in name}
    assert reasons == {"only", "adapter", "prefix", "home", "spread", "credit"}


def test_our_metrics_have_units_and_counters_end_in_total() -> None:
    for family in filled().collect():
        if not family.name.startswith("lorikeet_") or family.documentation.startswith("Deprecated"):
            continue
        assert (family.type == "counter") is family.name.endswith("_total")
        if family.documentation.startswith("Seconds"):
            assert "_seconds" in family.name


def test_names_are_lorax_s_own() -> None:
    values = samples(filled())
    names = {name.split("{")[0] for name in values}
    assert names >= LORAX_COUNTERS
    assert names >= {f"{name}_{suffix}" for name in LORAX_HISTOGRAMS for suffix in ("bucket", "sum", "count")}
    assert names >= {f"{name}_{suffix}" for name in LORAX_SUMMARIES for suffix in ("sum", "count")}
    assert names >= LORAX_GAUGES
    assert values['lorax_batch_inference_failure{method="prefill"}'] == 0
    assert values['lorax_batch_concat{reason="backpressure"}'] == 1
    assert values["lorax_request_count"] == 2
    assert values['lorax_request_failure{err="validation"}'] == 1
    assert values['lorax_batch_inference_count{method="prefill"}'] == 1
    assert values["lorax_request_skipped_tokens_sum"] == 3
    assert values["lorax_batch_current_size"] == 2
    assert values["lorax_batch_current_max_tokens"] == 5 * 16
    assert not any(name.endswith("_total") and name.startswith("lorax") for name in names)


def test_our_own_metrics() -> None:
    values = samples(filled())
    assert values["lorikeet_generated_tokens_total"] == 2
    assert values["lorikeet_preemptions_total"] == 1
    assert values["lorikeet_kv_pages_used"] == 5
    assert values["lorikeet_kv_pages_cached"] == 7
    assert values["lorikeet_kv_pages"] == 100
    assert values["lorikeet_inter_token_latency_seconds_count"] == 4
    assert values["lorikeet_inter_token_latency_seconds_sum"] == pytest.approx(0.05)


def test_the_text_form_can_be_parsed() -> None:
    families = {family.name: family for family in text_string_to_metric_families(filled().prometheus().decode())}
    buckets = [sample.value for sample in families["lorax_request_duration"].samples if sample.name.endswith("_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 1
    assert len(buckets) == 36
    assert all(family.documentation for family in families.values())


def test_the_json_form_is_lorax_s() -> None:
    values = json.loads(filled().lorax_json())
    assert values["lorax_request_count"] == {"type": "counter", "data": [{"key": "", "value": 2.0}]}
    assert values["lorax_request_failure"]["data"] == [{"key": 'lorax_request_failure{err="validation"}', "value": 1.0}]
    duration = {entry["key"]: entry["value"] for entry in values["lorax_request_duration"]["data"]}
    assert (duration["sum"], duration["count"]) == (0.25, 1.0)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [("application/json", "application/json"), ("*/*", PROMETHEUS_TYPE), ("", PROMETHEUS_TYPE)],
)
def test_the_accept_header_chooses(accept: str, content_type: str) -> None:
    assert filled().render(accept)[1] == content_type


def test_a_value_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram([1, 2])
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1", 2.0), ("2", 4.0), ("+Inf", 5.0)]
    assert (histogram.count, histogram.sum) == (5, 8.0)
