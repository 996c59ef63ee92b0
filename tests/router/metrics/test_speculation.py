"""Metrics of draft tokens by method and adapter: they add up for any message."""

from lorikeet.adapters.refs import Pin, SourceKind
from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.metrics.groups import BASE, MAX_LABELS, OTHER, num_verified
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.requests.request import Adapter

LOOKUP, MEDUSA, DRAFT, RESAMPLE, BONUS = 2, 3, 4, 5, 6


def output(sources: list[int], ends: list[int], drafted: list[int], accepted: int) -> pb.RequestOutput:
    return pb.RequestOutput(
        token_ids=range(len(sources)),
        sources=bytes(sources),
        step_ends=bytes(ends),
        num_drafted=drafted,
        num_accepted=accepted,
        draft_seconds=0.25,
        verify_seconds=1.0,
        accept_seconds=0.125,
    )


def adapter(alias: str = "") -> Adapter:
    return Adapter("name", (Pin(SourceKind.HUB, "owner/secret", "1"),), alias=alias)


def test_each_method_and_adapter_has_its_own_numbers() -> None:
    metrics = Metrics()
    metrics.speculation_stats(output([LOOKUP, LOOKUP, BONUS], [0, 0, 1], [2, 0, 0], 2), 3, None, "")
    metrics.speculation_stats(output([RESAMPLE], [1], [4, 0, 0], 0), 1, None, "")
    metrics.speculation_stats(output([MEDUSA, RESAMPLE], [0, 1], [0, 3, 0], 1), 2, adapter("mine"), "a" * 64)
    metrics.speculation_stats(output([DRAFT, DRAFT], [0, 1], [0, 0, 4], 2), 2, adapter(), "b" * 64)
    text = metrics.prometheus().decode()
    for line in (
        f'drafted_tokens_total{{method="lookup",adapter="{BASE}"}} 6.0',
        f'accepted_tokens_total{{method="lookup",adapter="{BASE}"}} 2.0',
        f'steps_total{{method="lookup",adapter="{BASE}"}} 2.0',
        'drafted_tokens_total{method="medusa",adapter="mine"} 3.0',
        'accepted_tokens_total{method="medusa",adapter="mine"} 1.0',
        'steps_total{method="draft",adapter="bbbbbbbbbbbb"} 1.0',
        f'seconds_total{{method="lookup",adapter="{BASE}",phase="verify"}} 2.0',
        'seconds_total{method="medusa",adapter="mine",phase="draft"} 0.25',
        'seconds_total{method="draft",adapter="bbbbbbbbbbbb",phase="accept"} 0.125',
    ):
        assert f"lorikeet_speculation_{line}\n" in text, line
    assert "lorikeet_drafted_tokens_total 13.0" in text and "lorikeet_accepted_tokens_total 5.0" in text
    assert "secret" not in text


def test_a_message_of_several_steps_and_methods_adds_up() -> None:
    metrics = Metrics()
    metrics.speculation_stats(
        output([LOOKUP, BONUS, RESAMPLE, MEDUSA, BONUS], [0, 1, 1, 0, 1], [1, 3, 0], 2), 5, None, ""
    )
    values = metrics.speculation.values
    assert values["drafted_tokens"] == {("lookup", BASE): 1, ("medusa", BASE): 3}
    assert values["accepted_tokens"] == {("lookup", BASE): 1, ("medusa", BASE): 1}
    assert sum(values["steps"].values()) == 3
    assert sum(values["verify"].values()) == 1.0


def test_accepted_tokens_are_counted_by_position() -> None:
    metrics = Metrics()
    sources = [MEDUSA, MEDUSA, RESAMPLE, MEDUSA, RESAMPLE, 1, LOOKUP, BONUS, MEDUSA, MEDUSA, MEDUSA, BONUS]
    ends = [0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 0, 1]
    metrics.speculation_stats(output(sources, ends, [1, 9, 0], 7), len(sources) - 2, adapter("mine"), "a" * 64)
    assert metrics.speculation.accepted_at == {
        ("medusa", "mine", 0): 3,
        ("medusa", "mine", 1): 2,
        ("lookup", "mine", 0): 1,
    }
    name = "lorikeet_speculation_accepted_tokens_per_position_total"
    assert f'{name}{{method="medusa",adapter="mine",position="1"}} 2.0\n' in metrics.prometheus().decode()


def test_tokens_beyond_a_stop_string_are_not_accepted() -> None:
    metrics = Metrics()
    metrics.speculation_stats(output([LOOKUP, LOOKUP, LOOKUP, BONUS], [0, 0, 0, 1], [3, 0, 0], 3), 2, None, "")
    assert metrics.speculation.values["accepted_tokens"] == {("lookup", BASE): 2}
    assert metrics.speculation.values["drafted_tokens"] == {("lookup", BASE): 3}


def test_steps_without_draft_tokens_do_not_count() -> None:
    assert num_verified(output([1, LOOKUP, BONUS, 1], [1, 0, 1, 1], [1, 0, 0], 1)) == 1
    assert num_verified(output([0], [1], [2, 0, 0], 0)) == 1
    assert num_verified(output([LOOKUP, LOOKUP], [0, 1], [2, 0, 0], 2)) == 1


def test_labels_are_bounded() -> None:
    metrics = Metrics()
    part = output([LOOKUP, BONUS], [0, 1], [1, 0, 0], 1)
    for number in range(3 * MAX_LABELS):
        metrics.speculation_stats(part, 2, adapter(), f"{number:064x}"[::-1])
    steps = metrics.speculation.values["steps"]
    assert len(steps) == MAX_LABELS + 1
    assert steps["lookup", OTHER] == 2 * MAX_LABELS


def test_no_families_before_the_first_draft_token() -> None:
    assert b"speculation" not in Metrics().prometheus()
