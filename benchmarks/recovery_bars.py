"""The bars about what outlives what ends, and the parts that measure them: harms, receipts, a long life, overload."""

from functools import partial

from benchmarks import (
    adapter_misses,
    four_shards,
    machines,
    marked_tests,
    overload,
    planted,
    receipts,
    recovery,
    soak,
)
from benchmarks.case import Bar, Over, Part, raw_value

PARTS: tuple[Part, ...] = (
    Part("recovery-kill", recovery.kills, recovery.SETTINGS),
    Part("recovery-stop", recovery.stops, recovery.SETTINGS),
    Part("recovery-roll", recovery.rolls, recovery.SETTINGS),
    Part("recovery-receipts", receipts.measure, receipts.SETTINGS),
    Part("recovery-soak", soak.measure, soak.SETTINGS),
    Part("recovery-machines", machines.measure, machines.SETTINGS),
    Part("recovery-overload", overload.measure, overload.SETTINGS),
    Part("recovery-shards", four_shards.measure, four_shards.SETTINGS),
    Part("recovery-misses", adapter_misses.measure, adapter_misses.SETTINGS),
    Part("recovery-planted", planted.of_recovery, planted.SETTINGS_OF_RECOVERY),
    Part("recovery-tests", marked_tests.long, marked_tests.settings("long")),
)


def _harms(what: str, part: str, num_harms: int, most_s: float | None) -> tuple[Bar, ...]:
    num_cases = num_harms // recovery.HARMS
    return (
        Bar(f"answers that {num_harms} {what} changed or lost", part, num_cases, recovery.num_wrong, 0,
            at_least=False, over=Over.SUM),
        Bar(f"longest silence of a stream, {num_harms} {what}", part, num_cases, recovery.longest_gap, most_s,
            at_least=False, unit="s", over=Over.WORST),
    )  # fmt: skip


BARS: tuple[Bar, ...] = (
    *_harms("kill -9 of a shard", "recovery-kill", recovery.KILLS, 1.0),
    *_harms("SIGSTOP of a shard", "recovery-stop", recovery.STOPS, 3.0),
    *_harms("rolling restarts", "recovery-roll", recovery.ROLLS, None),
    Bar("of 1 000 receipts not identical on loaded replicas or on another server", "recovery-receipts",
        receipts.CASES, receipts.num_different, 0, at_least=False, over=Over.SUM),
    Bar("wrong answers in a life of 100 000 requests with faults", "recovery-soak", 1, partial(raw_value, "num_wrong"),
        0, at_least=False, over=Over.SUM),
    Bar("pages, files and requests held after it", "recovery-soak", 1, soak.num_kept, 0, at_least=False,
        over=Over.SUM),
    Bar("the router's growth in it, after a fifth", "recovery-soak", 1, soak.growth, 0.02, at_least=False,
        over=Over.WORST),
    Bar("failures of state machines at length", "recovery-machines", machines.NUM_MACHINES, machines.num_failures, 0,
        at_least=False, over=Over.SUM),
    Bar("fewest random steps of a state machine", "recovery-machines", machines.NUM_MACHINES,
        partial(raw_value, "steps"), 10_000, over=Over.WORST),
    Bar("refusal beyond capacity, p99", "recovery-overload", overload.ROUNDS, overload.refusal_p99, 10.0,
        at_least=False, unit="ms"),
    Bar("tokens/s under a flood of further requests, over without", "recovery-overload", overload.ROUNDS,
        overload.goodput, 0.9),
    Bar("one router over four shards of 8 000 tokens/s, of four times one", "recovery-shards", four_shards.ROUNDS,
        four_shards.share, 0.9),
    Bar("adapter misses, two replicas of 8 slots, over round robin's", "recovery-misses", adapter_misses.ROUNDS,
        adapter_misses.over_peer, 0.5, at_least=False),
    Bar("planted faults of recovery that no test notices", "recovery-planted", planted.NUM_OF_RECOVERY,
        planted.num_unnoticed, 0, at_least=False, over=Over.SUM),
    Bar("failed tests of those too long for make test", "recovery-tests", marked_tests.NUM_LONG,
        marked_tests.num_failed, 0, at_least=False, over=Over.SUM),
)  # fmt: skip
