"""Every bar that the project holds itself to, and the parts that measure them: one table each."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from benchmarks import (
    adapter_bars,
    clients,
    closed_loop,
    device_bars,
    exactness,
    family_bars,
    leak,
    open_loop,
    recovery_bars,
    speculation_bars,
    start,
    whole,
)
from benchmarks.case import Bar, Over, Part, raw_value

CLOSED = (1, 8, 32)
WANTED_SHARE: Mapping[int, float] = {1: 0.72, 8: 0.70, 32: 0.70}
CHANCE = 1e-6 / (3 * exactness.NUM_DISTRIBUTIONS)
"""All tests of the law together fail by chance once in a million choices of seeds."""

PARTS: tuple[Part, ...] = (
    *(
        Part(f"closed-{clients}", partial(closed_loop.measure, clients), closed_loop.SETTINGS, closed_loop.void)
        for clients in CLOSED
    ),
    Part("open", open_loop.measure, open_loop.SETTINGS),
    Part("transformers", whole.transformers, whole.PEER_SETTINGS),
    Part("router", whole.router, whole.ROUTER_SETTINGS),
    Part("exact", exactness.architectures, exactness.EXACT_SETTINGS),
    Part("adapters-exact", exactness.adapters, exactness.ADAPTER_SETTINGS),
    Part("law", exactness.distributions, exactness.LAW_SETTINGS),
    Part("clients", clients.measure, clients.SETTINGS),
    Part("leak", leak.measure, leak.SETTINGS),
    Part("start", start.measure, start.SETTINGS),
    *family_bars.PARTS,
    Part("clone", whole.clone),
    *adapter_bars.PARTS,
    *speculation_bars.PARTS,
    *recovery_bars.PARTS,
    *device_bars.PARTS,
)


def _closed(clients: int) -> tuple[Bar, ...]:
    part, rounds = f"closed-{clients}", closed_loop.ROUNDS
    return (
        Bar(f"share of the machine's limit, {clients} clients", part, rounds, closed_loop.share_of_limit,
            WANTED_SHARE[clients]),
        Bar(f"times vLLM, {clients} clients", part, rounds, closed_loop.over_vllm, 1.0),
    )  # fmt: skip


BARS: tuple[Bar, ...] = (
    *(bar for clients in CLOSED for bar in _closed(clients)),
    Bar("times transformers continuous batching", "transformers", whole.ROUNDS, whole.over_transformers, 4.0),
    Bar("highest rate with p99 first token within 2 s", "open", 2, open_loop.highest_rate, None, unit="requests/s"),
    Bar("router alone, 256 streams", "router", whole.ROUNDS, partial(raw_value, "tokens_per_second"), 40_000,
        unit="tokens/s"),
    Bar("router's share of the first token, 64 clients", "router", whole.ROUNDS, whole.added_first_token_ms, 5.0,
        at_least=False, unit="ms"),
    Bar("greedy texts that differ from transformers", "exact", exactness.NUM_ARCHITECTURES, exactness.differences, 0,
        at_least=False, over=Over.SUM),
    Bar("fewest distinct tokens in a compared text", "exact", exactness.NUM_ARCHITECTURES, exactness.distinct, 12,
        over=Over.WORST),
    Bar("ties beyond one in 10 000 tokens", "exact", exactness.NUM_ARCHITECTURES, exactness.ties_beyond_allowed, 0,
        at_least=False, over=Over.SUM),
    Bar("largest error of a log probability", "exact", exactness.NUM_ARCHITECTURES, exactness.logprob_error, 1e-4,
        at_least=False, over=Over.WORST),
    Bar("texts under adapters that differ from PEFT", "adapters-exact", exactness.NUM_ADAPTED, exactness.differences, 0,
        at_least=False, over=Over.SUM),
    Bar("share of texts that an adapter changes", "adapters-exact", exactness.NUM_ADAPTED, exactness.share_changed, 0.9,
        over=Over.WORST),
    Bar("fewest distinct tokens in a text under adapters", "adapters-exact", exactness.NUM_ADAPTED, exactness.distinct,
        12, over=Over.WORST),
    Bar("ties under adapters beyond one in 10 000 tokens", "adapters-exact", exactness.NUM_ADAPTED,
        exactness.ties_beyond_allowed, 0, at_least=False, over=Over.SUM),
    Bar("least likely χ² of the sampling law", "law", exactness.NUM_DISTRIBUTIONS, exactness.least_likely, CHANCE,
        over=Over.WORST),
    Bar("failed tests of LoRAX's own client", "clients", clients.NUM_TESTS, clients.num_failed, 0, at_least=False,
        over=Over.SUM),
    Bar("wrong answers to 2 000 hostile requests", "leak", leak.BATCHES, leak.num_wrong, 0, at_least=False,
        over=Over.SUM),
    Bar("pages held when idle after them", "leak", leak.BATCHES, partial(raw_value, "pages_held"), 0, at_least=False,
        over=Over.WORST),
    Bar("second start of the embedded model", "start", start.ROUNDS, partial(raw_value, "ready_s"), 10.0,
        at_least=False, unit="s"),
    *family_bars.BARS,
    Bar("make test in a fresh clone", "clone", 1, partial(raw_value, "seconds"), 600.0, at_least=False, unit="s",
        over=Over.WORST),
    *adapter_bars.BARS,
    *speculation_bars.BARS,
    *recovery_bars.BARS,
    *device_bars.BARS,
)  # fmt: skip

NOT_REACHED: dict[str, str] = json.loads(Path(__file__).with_name("results").joinpath("not_reached.json").read_text())
"""Bars that are missed, and what limits them as far as is known; docs/LOG.md tells what was tried. The READMEs show
them as missed. Every other miss fails the tests, and so does one of these once it holds."""
