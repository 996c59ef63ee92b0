"""Fields that restrict the tokens of an output and say how it ends, with the same names on every generation route.

The names and meanings are vLLM's; LoRAX's `ignore_eos_token` and SGLang's `min_new_tokens` and `no_stop_trim` are other
names of the same. Ranges of token ids are checked in `Service.constrained`, which knows the vocabulary.
"""

from dataclasses import dataclass

from lorikeet.router.errors import ValidationError
from lorikeet.router.schemas.fields import Fields, are_token_ids

MAX_BIASES = 1024
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
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def masks(self) -> str | None:
        """The first field that excludes tokens; None where no token is excluded."""
        names = ("allowed_token_ids", "bad_words", "min_tokens")
        return next((name for name in names if getattr(self, name)), None)


def read_constraints(fields: Fields) -> Constraints:
    """Raises WrongJsonType or ValidationError."""
    # Special tokens are never separated by spaces, which is what false asks for and all that most tokenizers can do.
    fields.optional_flag("spaces_between_special_tokens")
    return Constraints(
        ignore_eos=fields.flag("ignore_eos") | fields.flag("ignore_eos_token"),
        min_tokens=_min_tokens(fields),
        stop_token_ids=token_ids(fields, "stop_token_ids", MAX_STOP_TOKENS),
        include_stop=_include_stop(fields),
        allowed_token_ids=token_ids(fields, "allowed_token_ids", MAX_ALLOWED_TOKENS),
        bad_words=_bad_words(fields),
        skip_special_tokens=fields.optional_flag("skip_special_tokens") is not False,
        logit_bias=_logit_bias(fields),
    )


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Raises ValidationError where the output would have to be longer than it may be."""
    if min_tokens > max_tokens:
        rule = f"must be <= the maximum number of generated tokens, {max_tokens}"
        raise ValidationError(f"`min_tokens` {rule}. Given: {min_tokens}", "min_tokens")


def _min_tokens(fields: Fields) -> int:
    given, other = fields.integer("min_tokens", "u32"), fields.integer("min_new_tokens", "u32")
    if given is not None and other is not None and given != other:
        raise ValidationError("`min_tokens` and `min_new_tokens` cannot both be set", "min_new_tokens")
    return (other if given is None else given) or 0


def _include_stop(fields: Fields) -> bool | None:
    given, untrimmed = fields.optional_flag("include_stop_str_in_output"), fields.flag("no_stop_trim")
    if given is False and untrimmed:
        raise ValidationError("`no_stop_trim` contradicts `include_stop_str_in_output`", "no_stop_trim")
    return True if untrimmed else given


def token_ids(fields: Fields, name: str, most: int) -> tuple[int, ...]:
    """In ascending order, each once. Raises ValidationError."""
    value = fields.take(name)
    if value is None or value == []:
        return ()
    if isinstance(value, list) and len(value) > most:
        raise ValidationError(f"`{name}` supports up to {most} token ids. Given: {len(value)}", name)
    if not isinstance(value, list) or not are_token_ids(value):
        raise ValidationError(f"`{name}` must be a list of token ids", name)
    return tuple(sorted(set(value)))


def _bad_words(fields: Fields) -> tuple[str, ...]:
    value = fields.take("bad_words")
    if isinstance(value, list) and len(value) > MAX_BAD_WORDS:
        raise ValidationError(f"`bad_words` supports up to {MAX_BAD_WORDS} words. Given: {len(value)}", "bad_words")
    words = fields.texts("bad_words")
    for word in words:
        if not word.strip():
            raise ValidationError("`bad_words` must not contain an empty word", "bad_words")
        if len(word.encode(errors="replace")) > MAX_BAD_WORD_BYTES:
            raise ValidationError(f"a word of `bad_words` may have up to {MAX_BAD_WORD_BYTES} bytes", "bad_words")
    return tuple(words)


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    given = fields.mapping("logit_bias") or {}
    if len(given) > MAX_BIASES:
        raise ValidationError(f"`logit_bias` supports up to {MAX_BIASES} tokens. Given: {len(given)}", "logit_bias")
    values = Fields(given, "logit_bias.")
    biases = []
    for name in given:
        bias = values.number(name)
        if not (name.isascii() and name.isdigit() and len(name) <= 9):
            raise ValidationError("`logit_bias` must map token ids to numbers", "logit_bias")
        if bias is None or not -100.0 <= bias <= 100.0:
            raise ValidationError("`logit_bias` values must be >= -100 and <= 100", "logit_bias")
        biases.append((int(name), bias))
    return tuple(biases)
