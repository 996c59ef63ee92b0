"""The bars about speculation and the parts that measure them: texts, counts, published tables, speed."""

from functools import partial

from benchmarks import dialled, guessing_speed, guessing_tables, heads_cost, lookup_speed, lossless, planted
from benchmarks.case import Bar, Over, Part, raw_value
from benchmarks.closed_loop import OURS, VLLM
from benchmarks.guessing import METHODS

PARTS: tuple[Part, ...] = (
    *(Part(f"speculation-{method}", partial(lossless.alone, method), lossless.SETTINGS) for method in METHODS),
    Part("speculation-mixed", lossless.mixed, lossless.SETTINGS),
    Part("speculation-planted", planted.measure, planted.SETTINGS),
    Part("speculation-gamma", guessing_tables.gamma, guessing_tables.SETTINGS),
    Part("speculation-sampled", guessing_tables.sampled, guessing_tables.SETTINGS),
    Part("speculation-copied", guessing_tables.copied, guessing_tables.SETTINGS),
    Part("speculation-uncopied", guessing_tables.uncopied, guessing_tables.SETTINGS),
    Part("speculation-heads", guessing_tables.medusa, guessing_tables.SETTINGS),
    Part("speculation-dialled", dialled.forwards, dialled.SETTINGS),
    Part("speculation-share", dialled.accepted, dialled.SETTINGS),
    Part("speculation-speed", guessing_speed.measure, guessing_speed.SETTINGS),
    *(
        part
        for load in guessing_speed.LOADS
        for part in (
            Part(f"speculation-schedule-{load}", partial(guessing_speed.schedules, load), guessing_speed.SETTINGS),
            Part(f"speculation-hopeless-{load}", partial(guessing_speed.hopeless, load), guessing_speed.SETTINGS),
        )
    ),
    Part("speculation-lookup-speed", lookup_speed.measure, lookup_speed.SETTINGS),
    Part("speculation-peer", lookup_speed.against_peer, lookup_speed.SETTINGS),
    Part("speculation-heads-cost", heads_cost.measure, heads_cost.SETTINGS),
)


def _texts(part: str, what: str, num_cases: int) -> tuple[Bar, ...]:
    return (
        Bar(f"texts that guessing changes, {what}", part, num_cases, lossless.num_wrong, 0, at_least=False,
            over=Over.SUM),
        Bar(f"answers whose steps or drafts are not the oracle's, {what}", part, num_cases, lossless.num_miscounted, 0,
            at_least=False, over=Over.SUM),
        Bar(f"of them ties beyond one in a hundred, {what}", part, num_cases, lossless.ties_beyond_allowed, 0,
            at_least=False, over=Over.SUM),
        Bar(f"largest difference of a log probability, {what}", part, num_cases, partial(raw_value, "logprob_error"),
            1e-4, at_least=False, over=Over.WORST),
    )  # fmt: skip


LOSSLESS: tuple[Bar, ...] = (
    *(bar for method in METHODS for bar in _texts(f"speculation-{method}", f"{method} alone", len(lossless.WIDTHS))),
    *_texts("speculation-mixed", "mixed in batches", len(lossless.COMBINATIONS)),
    Bar("planted faults that no test notices", "speculation-planted", planted.NUM_FAULTS, planted.num_unnoticed, 0,
        at_least=False, over=Over.SUM),
)  # fmt: skip

COUNTS: tuple[Bar, ...] = (
    Bar("greedy drafts of 1 … 10: answers unlike the oracle's", "speculation-gamma", 1 + len(guessing_tables.WIDTHS),
        guessing_tables.num_miscounted, 0, at_least=False, over=Over.SUM),
    Bar("sampled drafts: steps off the expected ones, in standard errors", "speculation-sampled",
        guessing_tables.NUM_SAMPLED, guessing_tables.distance, 3.0, at_least=False, over=Over.WORST),
    Bar("tokens per step of lookup on copied texts, over LoRAX's rule", "speculation-copied",
        len(guessing_tables.LOOKUP_WIDTHS), guessing_tables.over_lorax, 1.08, over=Over.WORST),
    Bar("rows proposed there, over LoRAX's rule", "speculation-copied", len(guessing_tables.LOOKUP_WIDTHS),
        guessing_tables.rows_over_lorax, 0.9, at_least=False, over=Over.WORST),
    Bar("answers there unlike the oracle's", "speculation-copied", len(guessing_tables.LOOKUP_WIDTHS),
        guessing_tables.num_miscounted, 0, at_least=False, over=Over.SUM),
    Bar("tokens per step of lookup on copied texts", "speculation-copied",
        len(guessing_tables.LOOKUP_WIDTHS), guessing_tables.tau, 2.53, over=Over.WORST),
    Bar("tokens per step of lookup on other texts", "speculation-uncopied", guessing_tables.NUM_UNCOPIED,
        guessing_tables.tau, None, unit="tokens"),
    Bar("answers there unlike the oracle's, other texts", "speculation-uncopied", guessing_tables.NUM_UNCOPIED,
        guessing_tables.num_miscounted, 0, at_least=False, over=Over.SUM),
    Bar("tokens per step of Medusa heads", "speculation-heads", guessing_tables.NUM_HEADS_KINDS, guessing_tables.tau,
        None, unit="tokens"),
    Bar("answers with heads unlike the oracle's", "speculation-heads", guessing_tables.NUM_HEADS_KINDS,
        guessing_tables.num_miscounted, 0, at_least=False, over=Over.SUM),
)  # fmt: skip

DIALLED: tuple[Bar, ...] = (
    Bar("dialled draft: rows off LMFlow's forwards", "speculation-dialled", len(dialled.Size().widths),
        dialled.off_published, 0.05, at_least=False, over=Over.WORST),
    Bar("dialled draft: accepted/drafted off Xinference's 0.86", "speculation-share", 1, dialled.off_share, 0.003,
        at_least=False, over=Over.WORST),
)  # fmt: skip

_ROUNDS = guessing_speed.ROUNDS
SPEED: tuple[Bar, ...] = (
    Bar("step of 4 tokens over one of 1", "speculation-speed", _ROUNDS, partial(guessing_speed.cost, 4), 1.15,
        at_least=False),
    Bar("step of 8 tokens over one of 1", "speculation-speed", _ROUNDS, partial(guessing_speed.cost, 8), 1.30,
        at_least=False),
    Bar("a draft's token over a step, over the ratio of weights", "speculation-speed", _ROUNDS,
        guessing_speed.cost_over_bytes, 1.5, at_least=False),
    Bar("times faster over what acceptance and costs allow, alone", "speculation-speed", _ROUNDS,
        partial(guessing_speed.efficiency, 1), 0.90),
    Bar("the same of 8 requests", "speculation-speed", _ROUNDS, partial(guessing_speed.efficiency, 8), 0.85),
    Bar("the same alone, were wider steps free and drafts cost their weights", "speculation-speed", _ROUNDS,
        guessing_speed.efficiency_of_bytes, 0.75),
    Bar("8-grams repeated in those texts", "speculation-speed", _ROUNDS, guessing_speed.repeated, 0.2, at_least=False,
        over=Over.WORST),
    *(
        bar
        for load in guessing_speed.LOADS
        for bar in (
            Bar(f"schedule auto over the best fixed width, {load} at once", f"speculation-schedule-{load}",
                guessing_speed.SCHEDULE_ROUNDS,
                partial(guessing_speed.rate, guessing_speed.AUTO, guessing_speed.FIXED), 0.98),
            Bar(f"schedule auto over off, nothing accepted, {load} at once", f"speculation-hopeless-{load}", _ROUNDS,
                partial(guessing_speed.rate, guessing_speed.HOPELESS, guessing_speed.OFF), 0.97),
            Bar(f"one request more than may guess, over off, {load} at once", f"speculation-hopeless-{load}", _ROUNDS,
                partial(guessing_speed.rate, guessing_speed.LIMITED, guessing_speed.OFF), 0.97),
        )
    ),
    Bar("copy-heavy adapter over HTTP with lookup, over without", "speculation-lookup-speed", lookup_speed.ROUNDS,
        partial(lookup_speed.times, lookup_speed.ON, lookup_speed.OFF), 2.0),
    Bar("times vLLM with its n-grams, the same adapter", "speculation-peer", lookup_speed.ROUNDS,
        partial(lookup_speed.times, OURS, VLLM), 2.0),
    Bar("a step with three Medusa heads over a plain one", "speculation-heads-cost", heads_cost.ROUNDS,
        partial(heads_cost.over_plain, "one"), 1.10, at_least=False),
    Bar("a step of four requests with four sets of heads over a plain one", "speculation-heads-cost",
        heads_cost.ROUNDS, partial(heads_cost.over_plain, "four"), 1.15, at_least=False),
)  # fmt: skip

BARS: tuple[Bar, ...] = (*LOSSLESS, *COUNTS, *DIALLED, *SPEED)
