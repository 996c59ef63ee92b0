"""The mixture: the documents that the base model is trained on, as one endless, seeded, seekable stream of tokens.

Any part of the stream can be computed without the parts before it, so a resumed run reads the same tokens as an
uninterrupted one.
"""

import random
import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from lorikeet.demo.data import corpus
from lorikeet.demo.data.corpus import CorpusFunction, SourceFile
from lorikeet.demo.data.tokenizer import ASSISTANT, BOS, END, EOS, SYSTEM, USER

Tokens = NDArray[np.uint16]

CHAT_SHARE = 0.35
"""Share of documented functions of at most MAX_FUNCTION_CHARS that also become a conversation."""
MAX_FUNCTION_CHARS = 1500
"""Every function up to this length is also a separate document, because prompts start like that."""
CUT_SHARE = 0.15
"""Share of line ends at which a text is cut into pieces."""
BLOCK_LEN = 2048
LINE_END = re.compile(r"\n *")


def documents(files: Sequence[SourceFile], seed: int) -> Iterator[str]:
    """Whole files, their functions, and some conversations made from docstrings. The tokenizer adds BOS."""
    for file in files:
        choice = random.Random(f"{seed} {file.path}")
        if file.text.strip():
            yield file.text + EOS
        for function in corpus.functions(file):
            if len(function.source) > MAX_FUNCTION_CHARS:
                continue
            yield function.source + EOS
            if function.docstring and choice.random() < CHAT_SHARE:
                yield conversation(function, choice)


def conversation(function: CorpusFunction, choice: random.Random) -> str:
    """The chat template's text for a question about this function and its answer, without BOS."""
    docstring = (function.docstring or "").strip()
    summary = " ".join(docstring.split("\n\n")[0].split())
    signature = _signature(function)
    question, answer = choice.choice(
        [
            (f"Write a function: {summary}", function.source.rstrip()),
            (f"Write a Python function `{function.name}`. {summary}", function.source.rstrip()),
            (f"Complete this function.\n\n{signature}", function.source.rstrip()),
            (f"{docstring}\n\nWrite `{function.name}`.", function.source.rstrip()),
            (f"What does this function do?\n\n{_without_docstring(function)}", summary),
        ]
    )
    system = f"{SYSTEM}You write Python.{END}" if choice.random() < 0.2 else ""
    return f"{system}{USER}{question}{END}{ASSISTANT}{answer}{END}{EOS}"


def _signature(function: CorpusFunction) -> str:
    """Everything before the body, including the docstring."""
    return "\n".join(function.source.split("\n")[: function.body_line])


def _without_docstring(function: CorpusFunction) -> str:
    lines = function.source.rstrip().split("\n")
    head = next((i for i, line in enumerate(lines) if line.rstrip().endswith(":")), 0)
    return "\n".join(lines[: head + 1] + lines[function.body_line :])


def tokenize(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast, seed: int) -> list[Tokens]:
    """One array per document, BOS first.

    Documents are cut at some line ends and the pieces are tokenized separately. The tokenizer merges a line end with
    the text around it, but a prompt may stop exactly there, so the model must learn both tokenizations.
    """
    choice = random.Random(f"{seed} cuts")
    pieces = [_cut(text, choice) for text in texts]
    encodings = tokenizer.backend_tokenizer.encode_batch([p for ps in pieces for p in ps], add_special_tokens=False)
    bos = tokenizer.convert_tokens_to_ids(BOS)
    flat = iter(encodings)
    return [np.array([bos, *(i for _ in ps for i in next(flat).ids)], dtype=np.uint16) for ps in pieces]


def _cut(text: str, choice: random.Random) -> list[str]:
    pieces, start = [], 0
    for match in LINE_END.finditer(text):
        if choice.random() < CUT_SHARE:
            position = choice.choice((match.start(), match.start(), match.start() + 1, match.end()))
            pieces.append(text[start:position])
            start = position
    return [piece for piece in [*pieces, text[start:]] if piece]


class TokenStream:
    """All documents once per epoch, concatenated without padding, cut into blocks and shuffled by the seed.

    Adjacent tokens are mostly of one file, so unshuffled batches would have little variety. At block boundaries, one
    token in BLOCK_LEN is followed by an unrelated one.
    """

    def __init__(self, pieces: Sequence[Tokens], seed: int, block_len: int = BLOCK_LEN) -> None:
        if not pieces:
            raise ValueError("a token stream needs at least one document")
        self.pieces = pieces
        self.seed = seed
        self.block_len = block_len
        self.epoch_len = sum(len(piece) for piece in pieces)
        self._epoch = -1
        self._tokens: Tokens = np.empty(0, dtype=np.uint16)

    def read(self, start: int, num_tokens: int) -> Tokens:
        """Tokens start … start + num_tokens of the endless stream."""
        parts = []
        while num_tokens > 0:
            epoch, offset = divmod(start, self.epoch_len)
            part = self._order(epoch)[offset : offset + num_tokens]
            parts.append(part)
            start, num_tokens = start + len(part), num_tokens - len(part)
        return np.concatenate(parts)

    def _order(self, epoch: int) -> Tokens:
        if epoch != self._epoch:
            choice = random.Random(f"{self.seed} {epoch}")
            documents = choice.sample(self.pieces, len(self.pieces))
            tokens = np.concatenate(documents)
            blocks = [tokens[start : start + self.block_len] for start in range(0, len(tokens), self.block_len)]
            choice.shuffle(blocks)
            self._tokens, self._epoch = np.concatenate(blocks), epoch
        return self._tokens
