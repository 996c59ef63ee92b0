"""The bars about the embedded family and the parts that measure them: base, adapters, draft, heads, the tool, size."""

from functools import partial

from benchmarks import family
from benchmarks.case import Bar, Over, Part

PARTS: tuple[Part, ...] = (
    Part("demo", family.base),
    *(Part(f"demo-{name}", partial(family.adapter, name)) for name in family.ADAPTERS),
    Part("demo-draft", family.draft),
    Part("demo-heads", family.heads),
    Part("demo-tool", family.tool),
    Part("demo-size", family.size),
)


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
)  # fmt: skip
