"""The tables that other systems publish about speculative decoding, measured with the embedded model from the server's
counters, with their figures and the replay oracle's. Exits with 1 if an answer's counts are not the oracle's.

    python -m benchmarks.speculation [--quick] [gamma] [rows] [chat] [sampled] [copied] [uncopied] [medusa]
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.speculation import counts, published
from benchmarks.speculation.counts import QUICK, CountsSize, counts_of, oracle, speed, tau
from tests.oracles.replay import fitted_chance, fitted_cost, iid_tokens_per_step

Rows = Iterable[Sequence[object]]
Columns = Mapping[str, Callable[[Raw], object]]
COUNTED: Columns = {"tokens per step": tau, "oracle": lambda raw: oracle(raw).tokens_per_step}


def table(title: str, head: Sequence[str], rows: Rows) -> None:
    """Markdown, numbers with three digits."""
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print("| " + " | ".join(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row) + " |")
    sys.stdout.flush()


def by_case(title: str, first: str, columns: Columns, cases: Sequence[Case]) -> None:
    """A row for each case, with its name in the first column."""
    rows = [(case.name, *(value(case.raw) for value in columns.values())) for case in cases]
    table(title, (first, *columns), rows)


def by_width(cases: Sequence[Case]) -> dict[int, Raw]:
    return {int(case.name.split()[1]): case.raw for case in cases if case.name.startswith("width ")}


def gamma(cases: Sequence[Case]) -> None:
    """LMFlow's table, both columns."""
    raws = by_width(cases)
    plain = raws.pop(0)
    rows = [
        (width, speed(raw) / speed(plain), published.LMFLOW_TIME[width], tau(raw), oracle(raw).tokens_per_step,
         published.LMFLOW_FORWARDS[width], raw["miscounted"], raw["ties"])
        for width, raw in raws.items()
    ]  # fmt: skip
    head = ("drafts", "times faster", "LMFlow", "tokens per step", "oracle", "LMFlow", "unlike the oracle", "ties")
    table("Drafts of a draft model, greedy (LMFlow's table)", head, rows)
    taus = [(width, tau(raw)) for width, raw in raws.items()]
    chance = fitted_chance(taus)
    cost = fitted_cost([(width, tau(raw), speed(raw) / speed(plain)) for width, raw in raws.items()])
    worst = max(abs(iid_tokens_per_step(chance, width) - value) for width, value in taus)
    print(f"\nfit: α {chance:.3f} (LMFlow's {published.LMFLOW_CHANCE}), largest error {worst:.3f}; ", end="")
    print(f"c {cost:.3f} (LMFlow's {published.LMFLOW_COST}); tokens in repeated 8-grams {plain['repeated']:.1%}")


def rows(cases: Sequence[Case]) -> None:
    """LLMSpeculativeSampling's three rows and a sweep."""
    raws = {case.name: case.raw for case in cases}
    alone, target = speed(raws["draft alone"]), speed(raws["target alone"])
    theirs = published.LLMSS
    cost, its_cost = target / alone, theirs.target / theirs.draft
    table(
        "Three speeds, temperature 1, top-k 20, top-p 0.9 (LLMSpeculativeSampling's)",
        ("", "tokens/s", "over target", "theirs over target"),
        [("draft alone", alone, alone / target, 1 / its_cost), ("target alone", target, 1.0, 1.0)],
    )
    sweep = by_width(cases)
    head = ("drafts", "tokens/s", "over target", "theirs", "tokens per step", "oracle", "accepted/drafted")
    widths = [
        (width, speed(raw), speed(raw) / target, theirs.speculative / theirs.target if width == published.LLMSS_WIDTH
         else "", tau(raw), oracle(raw).tokens_per_step, counts_of(raw).share_accepted)
        for width, raw in sweep.items()
    ]  # fmt: skip
    table(f"Speculative, by drafts (c {cost:.3f}, theirs {its_cost:.3f})", head, widths)


def chat(cases: Sequence[Case]) -> None:
    """Xinference's accepted over drafted, its phases and its speed-up."""
    raws = {case.name: case.raw for case in cases}
    off, on = raws["off"], raws["width 4"]
    head = ("", "accepted/drafted", "times faster", "drafting s", "verifying s", "accepting s", "tokens/s")
    phases = [on[f"{phase}_seconds"] for phase in ("draft", "verify", "accept")]
    expected = oracle(on).share_accepted
    table(
        "Four drafts, temperature 0.7, top-p 0.95, top-k 40 (Xinference's)",
        head,
        [
            ("ours", counts_of(on).share_accepted, speed(on) / speed(off), *phases, speed(on)),
            ("oracle", expected, "", "", "", "", ""),
            ("Xinference", published.XINFERENCE_ACCEPTED, published.XINFERENCE_FASTER, "", "", "", ""),
        ],
    )


def sampled(cases: Sequence[Case]) -> None:
    """The draft model with both verification rules, and the expected counts."""
    columns: Columns = {
        **COUNTED, "standard error": lambda raw: oracle(raw).standard_error,
        "distance in standard errors": counts.distance,
    }  # fmt: skip
    by_case("A draft model at temperature 0.8", "rule, drafts", columns, cases)


def lookup(cases: Sequence[Case]) -> None:
    """Prompt lookup by corpus, and LoRAX's rule."""
    columns: Columns = {
        **COUNTED, "LoRAX's rule": lambda raw: tau(raw["lorax"]), "times": counts.over_lorax,
        "drafts per step": lambda raw: counts_of(raw).drafted_per_step,
        "LoRAX's": lambda raw: counts_of(raw["lorax"]).drafted_per_step, "share": counts.rows_over_lorax,
    }  # fmt: skip
    by_case("Prompt lookup", "corpus, drafts", columns, cases)
    table("Published for prompt lookup", ("rule", "summaries", "questions with context", "chat, first turn"),
          [(rule, *values) for rule, values in published.LOOKUP_TAU.items()])  # fmt: skip


def medusa(cases: Sequence[Case]) -> None:
    """Chains of heads by corpus."""
    columns: Columns = {
        **COUNTED, "accepted/drafted": lambda raw: counts_of(raw).share_accepted,
        "unlike the oracle": itemgetter("miscounted"), "ties": itemgetter("ties"),
    }  # fmt: skip
    low, high = published.MEDUSA_CHAIN
    by_case(f"Three Medusa heads (Vicuna-7B's in a chain: {low} to {high})", "texts", columns, cases)


TABLES: dict[str, tuple[Callable[..., Cases], Callable[[Sequence[Case]], None]]] = {
    "gamma": (counts.gamma, gamma),
    "rows": (counts.three_rows, rows),
    "chat": (counts.chat, chat),
    "sampled": (counts.sampled, sampled),
    "copied": (counts.copied, lookup),
    "uncopied": (counts.uncopied, lookup),
    "medusa": (counts.medusa, medusa),
}


def main() -> int:
    parser = arguments.parser(__doc__, quick=True)
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], metavar="TABLE", help="all if none is named")
    options = parser.parse_args()
    size = QUICK if options.quick else CountsSize()
    tables_measured: dict[str, list[dict[str, Any]]] = {}
    for name in options.tables or TABLES:
        measure, show = TABLES[name]
        cases = list(measure(size=size))
        show(cases)
        tables_measured[name] = [{"case": case.name, **case.raw, "error": case.error} for case in cases]
    print(json.dumps(tables_measured))
    return int(any(case["error"] or case.get("miscounted") for cases in tables_measured.values() for case in cases))


if __name__ == "__main__":
    sys.exit(main())
