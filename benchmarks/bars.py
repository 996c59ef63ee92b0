"""Every bar that the project holds itself to, and the parts that measure them: one table each."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks import clients, closed_loop, exactness, family, leak, open_loop, start, whole
from benchmarks.case import Bar, Over, Part

CLOSED = (1, 8, 32)
WANTED_SHARE: Mapping[int, float] = {1: 0.72, 8: 0.70, 32: 0.70}
CHANCE = 1e-6 / (3 * exactness.NUM_LAWS)
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
    Part("law", exactness.laws, exactness.LAW_SETTINGS),
    Part("clients", clients.measure, clients.SETTINGS),
    Part("leak", leak.measure, leak.SETTINGS),
    Part("start", start.measure, start.SETTINGS),
    Part("demo", family.base),
    *(Part(f"demo-{name}", partial(family.adapter, name)) for name in family.ADAPTERS),
    Part("demo-draft", family.draft),
    Part("demo-heads", family.heads),
    Part("demo-tool", family.tool),
    Part("demo-size", family.size),
    Part("clone", whole.clone),
)


def _raw(name: str, raw: Mapping[str, Any]) -> float:
    return float(raw[name])


def _closed(clients: int) -> tuple[Bar, ...]:
    part, rounds = f"closed-{clients}", closed_loop.ROUNDS
    return (
        Bar(f"share of the machine's limit, {clients} clients", part, rounds, closed_loop.share_of_limit,
            WANTED_SHARE[clients]),
        Bar(f"times vLLM, {clients} clients", part, rounds, closed_loop.over_vllm, 1.0),
    )  # fmt: skip


def _adapter(name: str) -> tuple[Bar, ...]:
    part = f"demo-{name}"
    bars = (
        Bar(f"{name}: held-out examples", part, 1, family.examples, 500, over=Over.WORST),
        Bar(f"{name}: exact answers", part, 1, family.exact, 0.95, over=Over.WORST),
        Bar(f"{name}: exact answers of the bare base", part, 1, family.base_exact, 0.05, at_least=False,
            over=Over.WORST),
    )  # fmt: skip
    mean = Bar(f"{name}: mean answer", part, 1, family.mean_answer, 16, unit="tokens", over=Over.WORST)
    least = Bar(f"{name}: shortest answer, copied", part, 1, family.least_copied, 48, unit="tokens", over=Over.WORST)
    return (*bars, *((mean,) if name != family.SHORT else ()), *((least,) if name == family.COPIED else ()))


BARS: tuple[Bar, ...] = (
    *(bar for clients in CLOSED for bar in _closed(clients)),
    Bar("times transformers continuous batching", "transformers", whole.ROUNDS, whole.over_transformers, 4.0),
    Bar("highest rate with p99 first token within 2 s", "open", 2, open_loop.highest_rate, None, unit="requests/s"),
    Bar("router alone, 256 streams", "router", whole.ROUNDS, partial(_raw, "tokens_per_second"), 40_000,
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
    Bar("least likely χ² of the sampling law", "law", exactness.NUM_LAWS, exactness.least_likely, CHANCE,
        over=Over.WORST),
    Bar("failed tests of LoRAX's own client", "clients", clients.NUM_TESTS, clients.num_failed, 0, at_least=False,
        over=Over.SUM),
    Bar("wrong answers to 2 000 hostile requests", "leak", leak.BATCHES, leak.num_wrong, 0, at_least=False,
        over=Over.SUM),
    Bar("pages held when idle after them", "leak", leak.BATCHES, partial(_raw, "pages_held"), 0, at_least=False,
        over=Over.WORST),
    Bar("second start of the embedded model", "start", start.ROUNDS, partial(_raw, "ready_s"), 10.0, at_least=False,
        unit="s"),
    Bar("embedded model's bits per byte over xz -9e", "demo", 1, family.bits_over_xz, 1.0, at_least=False,
        over=Over.WORST),
    Bar("held-out functions whose continuation compiles", "demo", 1, family.compiled_share, 0.60, over=Over.WORST),
    *(bar for name in family.ADAPTERS for bar in _adapter(name)),
    Bar("draft model's overlap with the base, temperature 1", "demo-draft", 1, family.overlap, 0.7, over=Over.WORST),
    Bar("draft model's share of the base's parameters", "demo-draft", 1, family.draft_share, 0.1, at_least=False,
        over=Over.WORST),
    Bar("tokens per step, heads of the base on held-out code", "demo-heads", 1, family.of_base, 1.5, over=Over.WORST),
    Bar("tokens per step, heads of the citation adapter", "demo-heads", 1, family.of_citation, 2.2, over=Over.WORST),
    Bar("tokens per step, the same joined with the adapter", "demo-heads", 1, family.of_citation_joined, 2.2,
        over=Over.WORST),
    Bar("tokens per step of heads by the tool, over the committed ones", "demo-tool", 1, family.tool_share, 0.95,
        over=Over.WORST),
    Bar("the tool's whole run on two cores", "demo-tool", 1, family.tool_minutes, 15, at_least=False, unit="min",
        over=Over.WORST),
    Bar("embedded family with its base", "demo-size", 1, family.megabytes, 25, at_least=False, unit="MB",
        over=Over.WORST),
    Bar("make test in a fresh clone", "clone", 1, partial(_raw, "seconds"), 600.0, at_least=False, unit="s",
        over=Over.WORST),
)  # fmt: skip
