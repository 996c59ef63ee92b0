"""Finds the tokens of a choice that its text shows: those that `logprobs` list."""

from collections import deque

from lorikeet.router.requests.types import FinishReason, Token


class VisibleTokens:
    """Finds the tokens of a choice that its text shows: no end-of-text token, nothing that a stop string cut off.

    The result does not depend on how the text is divided into chunks: a token is listed once text of it is shown.
    """

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
        self._waiting: deque[Token] = deque()
        """Tokens whose text is not shown yet, because it may become a stop string."""

    def take(self, tokens: list[Token], text: str, finish: FinishReason | None) -> list[tuple[Token, int]]:
        """(token, offset of its text) of the tokens whose text `text` shows, after those of earlier chunks."""
        self._text_length += len(text)
        self._waiting.extend(tokens)
        shows_all = finish is not None and finish is not FinishReason.STOP_SEQUENCE
        shown = []
        while self._waiting:
            token = self._waiting[0]
            start = self._offset + token.num_earlier
            if not (token.hidden or shows_all or start < self._text_length):
                break
            self._waiting.popleft()
            if not token.hidden:
                shown.append((token, start))
                self._offset += len(token.text)
                continue
            if self._is_echoed:
                shown.append((token, start))
            self._offset = start
        return shown
