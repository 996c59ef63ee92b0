"""Numbers of adapters: each under its own label, and no more labels than a dashboard bears."""

from lorikeet.adapters.refs import Pin, Source
from lorikeet.router.metrics.adapters import MOST_LABELS, OTHER
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.requests.adapter_ref import Adapter


def adapter(alias: str = "") -> Adapter:
    return Adapter("name", (Pin(Source.HUB, "owner/secret", "1"),), alias=alias)


def test_labels_are_bounded() -> None:
    metrics = Metrics()
    for number in range(3 * MOST_LABELS):
        for _ in range(2):
            metrics.adapters.sent(adapter(), f"{number:064x}"[::-1], 5, was_resident=number % 2 == 0)
    counts = metrics.adapters.requests.values
    assert len(counts) == MOST_LABELS + 1
    assert counts[OTHER] == 2 * 2 * MOST_LABELS
    assert sum(counts.values()) == 2 * 3 * MOST_LABELS
    assert metrics.adapters.hits.values == {"slot": 3 * MOST_LABELS, "elsewhere": 3 * MOST_LABELS}


def test_aliases_are_named_and_ids_are_not() -> None:
    metrics = Metrics()
    metrics.adapters.sent(adapter('the "best"\\'), "a" * 64, 5, was_resident=True)
    metrics.adapters.received(adapter(), "b" * 64, 7)
    metrics.adapters.failed(adapter(), "")
    metrics.adapters.loaded("disk", 0.25)
    text = metrics.prometheus().decode()
    assert 'lorikeet_adapter_requests_total{adapter="the \\"best\\"\\\\"} 1.0' in text
    assert 'lorikeet_adapter_generated_tokens_total{adapter="bbbbbbbbbbbb"} 7.0' in text
    assert 'lorikeet_adapter_errors_total{adapter="other"} 1.0' in text
    assert 'lorikeet_adapter_load_seconds_sum{tier="disk"} 0.25' in text
    assert "secret" not in text


def test_without_adapters_there_is_nothing_to_see() -> None:
    assert "lorikeet_adapter" not in Metrics().prometheus().decode()
