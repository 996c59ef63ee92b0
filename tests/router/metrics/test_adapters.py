"""Metrics of adapters: each has its own label, and the number of labels is bounded."""

from lorikeet.adapters.refs import Pin, SourceKind
from lorikeet.router.metrics.groups import MAX_LABELS, OTHER
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.requests.request import Adapter


def adapter(alias: str = "") -> Adapter:
    return Adapter("name", (Pin(SourceKind.HUB, "owner/secret", "1"),), alias=alias)


def test_labels_are_bounded() -> None:
    metrics = Metrics()
    for number in range(3 * MAX_LABELS):
        for _ in range(2):
            metrics.adapters.sent(adapter(), f"{number:064x}"[::-1], 5, "slot" if number % 2 else "disk")
    counts = metrics.adapters.requests.values
    assert len(counts) == MAX_LABELS + 1
    assert counts[OTHER] == 2 * 2 * MAX_LABELS
    assert sum(counts.values()) == 2 * 3 * MAX_LABELS
    assert metrics.adapters.hits.values == {"slot": 3 * MAX_LABELS, "disk": 3 * MAX_LABELS}


def test_aliases_keep_their_label_when_others_have_used_up_the_rest() -> None:
    metrics = Metrics()
    for number in range(2 * MAX_LABELS):
        metrics.adapters.sent(adapter(), f"{number:064x}"[::-1], 5, "slot")
    metrics.adapters.sent(adapter("late"), "f" * 64, 5, "slot")
    assert metrics.adapters.requests.values["late"] == 1
    assert metrics.adapters.requests.values[OTHER] == MAX_LABELS


def test_labels_have_aliases_but_not_ids() -> None:
    metrics = Metrics()
    metrics.adapters.sent(adapter('the "best"\\'), "a" * 64, 5, "slot")
    metrics.adapters.received(adapter(), "b" * 64, 7)
    metrics.adapters.failed(adapter(), "")
    metrics.adapters.loaded("disk", 0.25)
    text = metrics.prometheus().decode()
    assert 'lorikeet_adapter_requests_total{adapter="the \\"best\\"\\\\"} 1.0' in text
    assert 'lorikeet_adapter_generated_tokens_total{adapter="bbbbbbbbbbbb"} 7.0' in text
    assert 'lorikeet_adapter_errors_total{adapter="other"} 1.0' in text
    assert 'lorikeet_adapter_load_seconds_sum{tier="disk"} 0.25' in text
    assert "secret" not in text


def test_no_families_without_adapters() -> None:
    assert "lorikeet_adapter" not in Metrics().prometheus().decode()
