"""Fields of vLLM's OpenAI routes about the tokens of the prompt and about what an answer contains."""

from dataclasses import dataclass

from lorikeet.router.errors import ValidationError
from lorikeet.router.schemas.fields import Fields

MAX_PROMPT_LOGPROBS = 20


@dataclass(frozen=True)
class PromptFields:
    """How a prompt becomes token ids."""

    add_special_tokens: bool
    num_kept: int | None
    """How many tokens are kept; None for all, -1 for as many as a prompt may have."""
    keeps_first: bool
    """Whether the first tokens are kept, instead of the last."""

    @property
    def keeps_last(self) -> bool:
        """Whether only the end of the prompt is kept."""
        return self.num_kept is not None and not self.keeps_first

    def most(self, max_input_length: int) -> int | None:
        """How many tokens are kept; None for all."""
        return max_input_length if self.num_kept == -1 else self.num_kept

    def cut(self, ids: list[int], max_input_length: int) -> list[int]:
        """The tokens that are kept."""
        num_kept = self.most(max_input_length)
        if num_kept is None or num_kept >= len(ids):
            return ids
        return ids[:num_kept] if self.keeps_first else ids[len(ids) - num_kept :]


@dataclass(frozen=True)
class ReportFields:
    """What an answer contains in addition."""

    token_ids: bool
    tokens_as_ids: bool
    """Whether tokens in `logprobs` are written as `token_id:<id>`."""
    num_prompt_logprobs: int | None
    """Likeliest tokens at each position of the prompt; None for no log probabilities of the prompt."""


def read_prompt_fields(fields: Fields, max_input_length: int, *, add_special_tokens: bool) -> PromptFields:
    """`add_special_tokens` is the route's default. Raises WrongJsonType or ValidationError."""
    given = fields.optional_flag("add_special_tokens")
    num_kept = fields.integer("truncate_prompt_tokens", "i32")
    if num_kept is not None and not (num_kept == -1 or 0 < num_kept <= max_input_length):
        rule = f"must be strictly positive and <= {max_input_length}, or -1"
        raise ValidationError(f"`truncate_prompt_tokens` {rule}. Given: {num_kept}", "truncate_prompt_tokens")
    side = fields.text("truncation_side")
    if side not in (None, "left", "right"):
        raise ValidationError("`truncation_side` must be left or right", "truncation_side")
    return PromptFields(add_special_tokens if given is None else given, num_kept, side == "right")


def read_report_fields(fields: Fields, *, stream: bool) -> ReportFields:
    """Raises WrongJsonType or ValidationError."""
    count = fields.integer("prompt_logprobs", "i32")
    if count is not None and not 0 <= count <= MAX_PROMPT_LOGPROBS:
        rule = f"must be >= 0 and <= {MAX_PROMPT_LOGPROBS}"
        raise ValidationError(f"`prompt_logprobs` {rule}. Given: {count}", "prompt_logprobs")
    if count is not None and stream:
        raise ValidationError("`prompt_logprobs` is not supported when streaming tokens", "prompt_logprobs")
    return ReportFields(fields.flag("return_token_ids"), fields.flag("return_tokens_as_token_ids"), count)
