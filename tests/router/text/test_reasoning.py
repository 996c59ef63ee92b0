"""Which parts of an output are its answer, in any division into chunks."""

import random
from dataclasses import replace

import pytest

from lorikeet.router.text.stop import AnswerFinder, OutputPart, ReasoningSyntax, Start

THINK = {start: ReasoningSyntax("<think>", ("</think>", "<end>"), start) for start in Start}
ONCE = {start: replace(reasoning, is_once=True) for start, reasoning in THINK.items()}
HARMONY = ReasoningSyntax(
    "<|channel|>analysis<|message|>",
    ("<|end|>",),
    Start.FREE,
    ("<|start|>assistant", "<|channel|>final<|message|>"),
)
CASES: list[tuple[ReasoningSyntax, str, str]] = [
    (THINK[Start.OPEN], "\n a <think> b\n</think>\n\n c d ", "c d "),
    (THINK[Start.OPEN], "a<end>b", "b"),
    (THINK[Start.OPEN], "a</thin", ""),
    (THINK[Start.CLOSED], "\n\na</think>b<thin", "\n\na</think>b<thin"),
    (THINK[Start.FREE], "\n<think>a</think>\nb", "b"),
    (THINK[Start.FREE], "\n b <", "\n b <"),
    (THINK[Start.FREE], " \n", " \n"),
    (THINK[Start.FREE], "x <think>y</think> z <think>", "x z "),
    (ONCE[Start.FREE], "<think>a</think>\n\n\n<think>b", "\n<think>b"),
    (ONCE[Start.FREE], "<think>a</think> b", " b"),
    (ONCE[Start.FREE], "\n{<think>a</think>}", "\n{<think>a</think>}"),
    (ONCE[Start.OPEN], "a</think><think>b</think>", "<think>b</think>"),
    (ONCE[Start.CLOSED], "<think>b</think>", "<think>b</think>"),
    (replace(HARMONY, is_once=True), "<|channel|>final<|message|>a<|start|>assistant", "a<|start|>assistant"),
    (HARMONY, "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|e", "b<|e"),
]  # fmt: skip


@pytest.mark.parametrize(("reasoning", "text", "answer"), CASES, ids=range(len(CASES)))
def test_the_answer_is_found_in_any_chunks(reasoning: ReasoningSyntax, text: str, answer: str) -> None:
    generator = random.Random(text)
    for number in range(60):
        cuts = sorted(generator.choices(range(len(text) + 1), k=number % 12)) if number else []
        chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        finder = AnswerFinder(reasoning)
        parts = [part for chunk in chunks for part in finder.push(chunk)]
        parts.append(finder.flush())
        assert "".join(part for part, _ in parts) == text
        assert "".join(part for part, kind in parts if kind is OutputPart.ANSWER) == answer, chunks
