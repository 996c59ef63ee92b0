"""Numbers in headers, queries and configurations of others."""

from typing import Any

MAX_DIGITS = 18


def whole_number(text: str, least: int, most: int) -> int | None:
    """The number that `text` writes in ASCII digits, from `least` to `most`; None for any other text."""
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        return None
    number = int(text)
    return number if least <= number <= most else None


def is_number(value: Any, most: float) -> bool:
    """Whether a value of a configuration is a number between `-most` and `most`, so neither infinite nor NaN."""
    # compared first: an integer of any size compares with a float, but cannot become one
    return type(value) in (int, float) and abs(value) <= most
