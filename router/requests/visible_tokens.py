"""Finds the tokens of a choice that its text shows: those that `logprobs` list."""

from lorikeet.router.requests.types import FinishReason, Token


class VisibleTokens:
    """Finds the tokens of a choice that its text shows: no end-of-text token, nothing that a stop string cut off."""

    def __init__(self, echo: str = "") -> None:
        self.echo = echo
        """The part of the prompt that is not shown yet."""
        self.prompt_ids: list[int] | None = None
        """The prompt's token ids, where asked for and not shown yet."""
        self._is_echoed = bool(echo)
        """Then special tokens are listed too, as the prompt's are: lm-eval expects one entry per output token."""
        self._offset = len(echo)
        """Characters of the text before the next token."""
        self._text_length = len(echo)

    def take(self, tokens: list[Token], text: str, finish: FinishReason | None) -> list[tuple[Token, int]]:
        """(token, offset of its text) of one chunk with its visible text."""
        self._text_length += len(text)
        shown = []
        for token in tokens:
            if token.hidden:
                if self._is_echoed:
                    shown.append((token, self._offset))
                continue
            if finish is FinishReason.STOP_SEQUENCE and self._offset >= self._text_length:
                break
            shown.append((token, self._offset))
            self._offset += len(token.text)
        return shown
