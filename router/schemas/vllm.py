"""Fields of vLLM's OpenAI routes about the tokens of the prompt."""

from dataclasses import dataclass

from lorikeet.router.errors import ValidationError
from lorikeet.router.schemas.fields import Fields


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
