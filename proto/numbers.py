"""Whole numbers in headers and in queries, which strangers write."""

MAX_DIGITS = 18


def whole_number(text: str, least: int, most: int) -> int | None:
    """The number that `text` writes in ASCII digits, from `least` to `most`; None for any other text."""
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        return None
    number = int(text)
    return number if least <= number <= most else None
