"""What other systems publish about their speculation, as data.

LMFlow: docs of its speculative inference, gpt2-xl with gpt2, alpaca's test set, temperature 0. Xinference: its page on
launching a speculative LLM. LLMSpeculativeSampling: its README, llama2-70b with llama2-7b. Prompt lookup: a replay of
the texts that its author published (Mistral-7B-Instruct-v0.1), tokens per forward. Medusa: LoRAX's documentation, and
top-1 accuracies of Vicuna-7B's heads, from the authors' training records.
"""

from collections.abc import Mapping
from dataclasses import dataclass

LMFLOW_FORWARDS: Mapping[int, float] = {
    1: 1.96, 2: 2.89, 3: 3.77, 4: 4.63, 5: 5.44, 6: 6.23, 7: 6.94, 8: 7.64, 9: 8.33, 10: 9.00,
}  # fmt: skip
"""Drafts → times fewer forwards, at the α that fits them best."""
LMFLOW_TIME: Mapping[int, float] = {
    1: 1.75, 2: 2.29, 3: 2.71, 4: 3.06, 5: 3.35, 6: 3.65, 7: 3.82, 8: 3.96, 9: 4.05, 10: 4.14,
}  # fmt: skip
LMFLOW_CHANCE, LMFLOW_COST = 0.959, 0.122

XINFERENCE_WIDTH = 4
XINFERENCE_ACCEPTED, XINFERENCE_FASTER = 0.86, 1.25
"""Accepted over drafted tokens, and times faster."""
XINFERENCE_CHANCE = 0.9406
"""The chance of a draft for which a γ of 4 gives that share."""


@dataclass(frozen=True)
class ThreeRows:
    """Speeds of the draft model, of the target and of both, in one unit."""

    draft: float
    target: float
    speculative: float


LLMSS = ThreeRows(1084.86, 329.83, 427.02)
LLMSS_WIDTH = 4

LOOKUP_TAU: Mapping[str, tuple[float, float, float]] = {
    "original rule, n = 3, 10 drafts": (2.48, 2.53, 1.39),
    "LoRAX's rule, 3 drafts": (1.75, 1.75, 1.28),
    "longest suffix ≤ 8, most recent, 3 drafts": (1.92, 1.93, 1.37),
    "longest suffix ≤ 8, most recent, 10 drafts": (2.42, 2.51, 1.44),
}
"""On summaries (CNN/DM), questions with context (HAGRID), first turns of a chat (MT-bench)."""

MEDUSA_CHAIN = (1.77, 2.08)
"""Tokens per step of three heads of Vicuna-7B in a chain: heads right independently, and nested."""
