"""Rounds in which servers take turns: only the one that is asked runs, the others are stopped.

Every round keeps the same summary of its requests, so that rounds of different benchmarks can be compared.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.evidence.figure import Raw
from benchmarks.load import completions, servers
from benchmarks.models.limit import OUTPUT_TOKENS, PROMPT_TOKENS

OURS, VLLM = "lorikeet", "vllm"
EXTRA: Mapping[str, Mapping[str, Any]] = {OURS: {"ignore_eos_token": True}, VLLM: {"ignore_eos": True}}
"""How each server is asked to generate past the end token."""
LENGTH = completions.RequestLength(PROMPT_TOKENS, OUTPUT_TOKENS)
IDLE_CPU = 0.01
"""Share of a core that a stopped server may have used; the other one would have paid for it."""


@contextlib.contextmanager
def alone(active: str, running: Mapping[str, servers.RunningServer], errors: list[str]) -> Iterator[None]:
    """All other servers are stopped meanwhile. Adds an error if they used processor time nevertheless."""
    others = [server for name, server in running.items() if name != active]
    with contextlib.ExitStack() as stack:
        for other in others:
            stack.enter_context(other.frozen())
        start, earlier_s = time.monotonic(), sum(other.cpu_seconds() for other in others)
        yield
        spent = sum(other.cpu_seconds() for other in others) - earlier_s
        if spent > servers.TICK_S + IDLE_CPU * (time.monotonic() - start):
            errors.append(f"the servers that were stopped while {active} ran used {spent:.2f} s of a core")


def summary(answers: Sequence[completions.TimedCompletion]) -> dict[str, Any]:
    """What a round keeps of its requests."""
    good = [answer for answer in answers if not answer.error]
    if not good:
        return {"requests": len(answers), "tokens_per_second": 0.0}
    return {
        "requests": len(answers),
        "tokens_per_second": round(completions.tokens_per_second(good), 3),
        "first_token_s": round(statistics.median(answer.first_token_s for answer in good), 4),
        "inter_token_s": round(statistics.median(answer.inter_token_s for answer in good), 5),
    }


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """The names in the order of a round: each comes first in turn."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def speedup(of: str, over: str, raw: Raw) -> float:
    """Tokens per second of one way over those of another, in the same round."""
    return float(raw[of]["tokens_per_second"] / raw[over]["tokens_per_second"])


def first_token(of: str, over: str, raw: Raw) -> float:
    """Median time to first token of one way over that of another, in the same round."""
    return float(raw[of]["first_token_s"] / raw[over]["first_token_s"])
