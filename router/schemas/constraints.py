"""Fields that restrict the tokens of an output and say how it ends, with the same names on every generation route.

The names and meanings are vLLM's; LoRAX's `ignore_eos_token` and SGLang's `min_new_tokens` and `no_stop_trim` are other
names of the same. Ranges of token ids are checked in `Service.constrained`, which knows the vocabulary.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainValidator, ValidationInfo

from lorikeet.router.errors import ValidationError
from lorikeet.router.schemas.model import U32, Body, Rejected, Texts, are_token_ids

MAX_STOP_TOKENS = 1024
MAX_ALLOWED_TOKENS = 16384
MAX_BAD_WORDS = 256
MAX_BAD_WORD_BYTES = 256


@dataclass(frozen=True)
class Constraints:
    """Typed and checked, but for the vocabulary."""

    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool | None = None
    """Whether the text includes what ended it; None for the route's default."""
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True

    @property
    def masks(self) -> str | None:
        """The first field that excludes tokens; None where no token is excluded."""
        names = ("allowed_token_ids", "bad_words", "min_tokens")
        return next((name for name in names if getattr(self, name)), None)


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Raises ValidationError where the output would have to be longer than it may be."""
    if min_tokens > max_tokens:
        rule = f"must be <= the maximum number of generated tokens, {max_tokens}"
        raise ValidationError(f"`min_tokens` {rule}. Given: {min_tokens}", "min_tokens")


def token_ids(most: int) -> PlainValidator:
    """Type of at most `most` token ids, which are read in ascending order, each once."""

    def read(value: Any, info: ValidationInfo) -> tuple[int, ...]:
        name = info.field_name
        if value == []:
            return ()
        if isinstance(value, list) and len(value) > most:
            raise ValidationError(f"`{name}` supports up to {most} token ids. Given: {len(value)}", name)
        if not isinstance(value, list) or not are_token_ids(value):
            raise ValidationError(f"`{name}` must be a list of token ids", name)
        return tuple(sorted(set(value)))

    return PlainValidator(read, json_schema_input_type=Annotated[list[int], Field(max_length=most)])


def _check_min_new_tokens(count: int, info: ValidationInfo) -> int:
    if info.data.get("min_tokens") not in (None, count):
        raise ValidationError("`min_tokens` and `min_new_tokens` cannot both be set", "min_new_tokens")
    return count


def _check_no_stop_trim(is_whole: bool, info: ValidationInfo) -> bool:
    if is_whole and info.data.get("include_stop_str_in_output") is False:
        raise ValidationError("`no_stop_trim` contradicts `include_stop_str_in_output`", "no_stop_trim")
    return is_whole


def _check_bad_words(words: list[str]) -> list[str]:
    if len(words) > MAX_BAD_WORDS:
        raise ValidationError(f"`bad_words` supports up to {MAX_BAD_WORDS} words. Given: {len(words)}", "bad_words")
    for word in words:
        if not word.strip():
            raise ValidationError("`bad_words` must not contain an empty word", "bad_words")
        if len(word.encode(errors="replace")) > MAX_BAD_WORD_BYTES:
            raise ValidationError(f"a word of `bad_words` may have up to {MAX_BAD_WORD_BYTES} bytes", "bad_words")
    return words


class ConstraintGroup(Body):
    """Fields of every generation route: which tokens the output may have, and what ends it."""

    ignore_eos: bool = Field(False, description="End-of-text tokens do not end the output")
    ignore_eos_token: bool = Field(False, description="The same as `ignore_eos`")
    min_tokens: U32 | None = Field(
        None, description="Until the output has so many tokens, end-of-text and stop tokens cannot be sampled and "
        "stop strings do not count; default 0"
    )  # fmt: skip
    min_new_tokens: Annotated[U32, AfterValidator(_check_min_new_tokens)] | None = Field(
        None, description="The same as `min_tokens`"
    )
    stop_token_ids: Annotated[tuple[int, ...], token_ids(MAX_STOP_TOKENS)] = Field(
        (), description=f"Tokens that end the output, at most {MAX_STOP_TOKENS}"
    )
    stop_regex = Rejected(neutral=([], ""))
    include_stop_str_in_output: bool | None = Field(
        None, description="Whether the text includes what ended it, stop tokens too; default: stop strings on LoRAX's "
        "routes"
    )  # fmt: skip
    no_stop_trim: Annotated[bool, AfterValidator(_check_no_stop_trim)] = Field(
        False, description="True: the same as `include_stop_str_in_output`"
    )
    repetition_detection = thinking_token_budget = Rejected()
    allowed_token_ids: Annotated[tuple[int, ...], token_ids(MAX_ALLOWED_TOKENS)] = Field(
        (), description=f"The only tokens of the output, at most {MAX_ALLOWED_TOKENS}"
    )
    bad_words: Annotated[Texts, AfterValidator(_check_bad_words)] = Field(
        default_factory=list,
        description="Texts that the output does not have at its start or after a space, at most "
        f"{MAX_BAD_WORDS} of {MAX_BAD_WORD_BYTES} bytes",
    )
    skip_special_tokens: bool = Field(True, description="False shows special tokens in the text")
    spaces_between_special_tokens: bool = Field(
        True, description="Special tokens are never separated by spaces, whatever the value"
    )

    def constraints(self) -> Constraints:
        """What the group asks for."""
        return Constraints(
            ignore_eos=self.ignore_eos or self.ignore_eos_token,
            min_tokens=(self.min_new_tokens if self.min_tokens is None else self.min_tokens) or 0,
            stop_token_ids=self.stop_token_ids,
            include_stop=True if self.no_stop_trim else self.include_stop_str_in_output,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=tuple(self.bad_words),
            skip_special_tokens=self.skip_special_tokens,
        )
