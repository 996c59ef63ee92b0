"""The replay oracle: how many steps a text takes, and how many drafts, from the text and the drafts of a rule alone.

A text does not depend on its drafts, so every width, rule and schedule can be counted over the same text: exactly if
the drafts are known, in expectation if only their acceptance probability is. Counts are the server's: the step that
ends the prompt gives one token and drafts nothing, a step drafts at most what can still be emitted in addition to the
target's own token, and drafts count as accepted as far as they are emitted. Imports no torch.

Leviathan et al. 2023 for the probabilities; Saxena 2023 and LoRAX's server for the two rules of prompt lookup.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Protocol


@dataclass(frozen=True)
class Text:
    """What one request wrote."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    max_new_tokens: int
    """As asked for; fewer were written where a token ended the text."""


@dataclass(frozen=True)
class Counts:
    """Counts of one text or several; with acceptance probabilities instead of known drafts they are expectations."""

    tokens: float = 0
    forwards: float = 0
    """Steps of the target that gave tokens, those that ended the prompts included."""
    drafted: float = 0
    accepted: float = 0
    texts: int = 0
    variance: float = 0.0
    """Variance of `forwards`."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.tokens + other.tokens,
            self.forwards + other.forwards,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.texts + other.texts,
            self.variance + other.variance,
        )

    @property
    def tokens_per_step(self) -> float:
        """τ: without the first token of each text, which the prompt's step gives."""
        return (self.tokens - self.texts) / max(1e-9, self.forwards - self.texts)

    @property
    def drafted_per_step(self) -> float:
        return self.drafted / max(1e-9, self.forwards - self.texts)

    @property
    def share_accepted(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def standard_error(self) -> float:
        """Standard error of `tokens_per_step`."""
        return self.tokens_per_step * sqrt(self.variance) / max(1e-9, self.forwards - self.texts)


NOTHING = Counts()


@dataclass(frozen=True)
class Known:
    """The state of a text when the next tokens are drafted."""

    ids: Sequence[int]
    """Prompt and output so far."""
    num_output: int
    newest: int
    """Tokens that the last step gave."""


class Rule(Protocol):
    """A source of drafts."""

    def __call__(self, known: Known, width: int) -> Sequence[int]:
        """At most `width` tokens, possibly none."""
        ...


def replay(text: Text, rule: Rule, width: int, *, is_bounded: bool = True) -> Counts:
    """Count a text under a rule. Unless `is_bounded`, as many are drafted at the end as anywhere else."""
    ids = [*text.prompt_ids, *text.output_ids]
    num_prompt, total = len(text.prompt_ids), len(text.output_ids)
    at, newest, counts = 1, 1, Counts(total, 1, 0, 0, 1)
    while at < total:
        room = min(width, text.max_new_tokens - at - 1) if is_bounded else width
        drafted = list(rule(Known(ids[: num_prompt + at], at, newest), room))[:room] if room > 0 else []
        agreed = _common(drafted, text.output_ids[at:])
        newest = min(agreed + 1, total - at)
        counts += Counts(0, 1, len(drafted), min(agreed, newest))
        at += newest
    return counts


def expected(text: Text, chances: Sequence[float], width: int) -> Counts:
    """What to expect where output i, drafted, is accepted with probability `chances[i]`, independently given the text.

    For a draft model: min(1, q/p) of the emitted token under the rule of rejection, `coupled_chance` under the coupled.
    """
    total = len(text.output_ids)
    # [total + 1] of the steps from output i on: forwards, their mean square, drafted, accepted
    mean, square, drafted, accepted = ([0.0] * (total + 1) for _ in range(4))
    for at in range(total - 1, 0, -1):
        room = max(0, min(width, text.max_new_tokens - at - 1))
        reach, drafted[at], mean[at], square[at] = 1.0, float(room), 1.0, 1.0
        for k in range(room + 1):
            is_last = k == room or at + k == total
            share = reach if is_last else reach * (1 - chances[at + k])
            after = min(at + k + 1, total)
            mean[at] += share * mean[after]
            square[at] += share * (2 * mean[after] + square[after])
            drafted[at] += share * drafted[after]
            accepted[at] += share * (k + accepted[after])
            if is_last:
                break
            reach *= chances[at + k]
    if total <= 1:
        return Counts(total, 1, 0, 0, 1)
    return Counts(total, 1 + mean[1], drafted[1], accepted[1], 1, square[1] - mean[1] ** 2)


def rejection_chance(p: float, q: float) -> float:
    """That a draft drawn from q is accepted, given that the emitted token has probability p; both of that token."""
    return min(1.0, q / p)


def coupled_chance(p: Sequence[float], q: Sequence[float], token_id: int) -> float:
    """That arg max (log q + g) is `token_id` given that arg max (log p + g) is, for the same Gumbel noise g."""
    own_p, own_q = p[token_id], q[token_id]
    if own_p <= 0 or own_q <= 0:
        return 0.0
    both = 1.0 / sum(max(a / own_p, b / own_q) for a, b in zip(p, q, strict=True))
    return both / own_p


@dataclass(frozen=True)
class LongestSuffix:
    """Our prompt lookup, by plain search: the longest run of newest tokens that stood earlier, where it last did."""

    shortest: int = 1
    longest: int = 8
    before: tuple[int, ...] = ()
    """A text that the request brings."""

    def __call__(self, known: Known, width: int) -> Sequence[int]:
        return self.find(known.ids, width)[0]

    def find(self, ids: Sequence[int], width: int) -> tuple[Sequence[int], int]:
        """The drafts, and how many tokens were matched for them."""
        best, followed = 0, ()  # type: tuple[int, Sequence[int]]
        for text, is_own in ((ids, True), (self.before, False)):
            for end in range(len(text) - is_own, 0, -1):
                length = _same_end(text, end, ids, self.longest)
                if length > best and length >= self.shortest:
                    best = length
                    followed = _continued(text, end, width) if is_own else text[end : end + width]
        return followed, best


def lorax(known: Known, width: int) -> Sequence[int]:
    """LoRAX's rule: where the newest token first stood before the last step's tokens; without a match, the beginning.

    It always drafts `width` tokens, repeating the last known one if there are no more.
    """
    earlier = known.ids[: len(known.ids) - known.newest]
    seed = known.ids[-1]
    first = next((place for place, token_id in enumerate(earlier) if token_id == seed), 0) + 1
    return [earlier[min(place, len(earlier) - 1)] for place in range(first, first + width)]


@dataclass(frozen=True)
class Table:
    """DraftTokens that are known for every output beforehand: heads, a draft model, a recorded text."""

    drafts: Sequence[Sequence[int]]
    """Those for the outputs i + 1, i + 2, … once output i is known."""

    def __call__(self, known: Known, width: int) -> Sequence[int]:
        return self.drafts[known.num_output - 1][:width]


@dataclass(frozen=True)
class Chain:
    """A draft model's best tokens, each after the text itself; its drafts after a rejected one never count."""

    best: Sequence[int]
    """For every output."""

    def __call__(self, known: Known, width: int) -> Sequence[int]:
        drafted = list(self.best[known.num_output : known.num_output + width])
        return drafted + [-1] * (width - len(drafted))  # behind the text's end it goes on drafting


def share_repeated(text: Text, length: int = 8) -> float:
    """Share of a text's tokens that end a run of so many which stood in prompt or output before."""
    ids, seen, num_repeated = [*text.prompt_ids, *text.output_ids], set[tuple[int, ...]](), 0
    for end in range(length, len(ids) + 1):
        run = tuple(ids[end - length : end])
        num_repeated += run in seen and end > len(text.prompt_ids)
        seen.add(run)
    return num_repeated / max(1, len(text.output_ids))


def iid_tokens_per_step(chance: float, width: int) -> float:
    """τ where every draft is accepted with the same chance: 1 + α + … + α^γ."""
    return sum(chance**k for k in range(width + 1))


def fitted_chance(rows: Sequence[tuple[int, float]]) -> float:
    """The α whose `iid_tokens_per_step` comes closest to (width, τ) in the sum of squares."""
    return _smallest(lambda a: sum((iid_tokens_per_step(a, width) - tau) ** 2 for width, tau in rows), 0.0, 1.0)


def fitted_cost(rows: Sequence[tuple[int, float, float]]) -> float:
    """The cost c of a draft's token in steps of the target, by (width, τ, times faster): times faster is τ / (γc + 1)
    where a step of several tokens costs as much as one. The mean over rows.
    """
    return sum((tau / faster - 1) / width for width, tau, faster in rows) / len(rows)


def _smallest(loss: "Loss", low: float, high: float) -> float:
    """Golden section; `loss` has one minimum."""
    ratio = (sqrt(5) - 1) / 2
    for _ in range(80):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    return (low + high) / 2


class Loss(Protocol):
    def __call__(self, value: float, /) -> float: ...


def _common(drafted: Sequence[int], wanted: Sequence[int]) -> int:
    pairs = enumerate(zip(drafted, wanted, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(drafted), len(wanted)))


def _same_end(text: Sequence[int], end: int, ids: Sequence[int], most: int) -> int:
    """Tokens before `end` in a text that are the newest of `ids`."""
    length = 0
    while length < min(most, end, len(ids)) and text[end - length - 1] == ids[-length - 1]:
        length += 1
    return length


def _continued(ids: Sequence[int], end: int, width: int) -> list[int]:
    """What follows `end`; where that reaches the newest token, what repeats goes on repeating."""
    period = len(ids) - end
    return [ids[end + place % period] for place in range(width)]
