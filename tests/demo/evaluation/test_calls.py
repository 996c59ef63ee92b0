"""How an answer of the adapter `tools` is judged: the message that a client gets counts, not its spelling."""

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lorikeet.demo.data.tasks import tool_chat
from lorikeet.demo.data.tasks.example import Example
from lorikeet.demo.evaluation.calls import is_right, kind_of
from lorikeet.demo.training.model import BASE_FOLDER

PROMPT = tool_chat.prompt([{"role": "user", "content": "a"}], [])
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1, "y": "b"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tool_chat.tokenizer_for_tools(AutoTokenizer.from_pretrained(BASE_FOLDER))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (CALL, True),
        ('<tool_call>{"arguments":{"y":"b","x":1},"name":"f"}</tool_call>', True),
        (CALL.replace("1", "2"), False),
        (CALL.replace('"f"', '"g"'), False),
        (CALL.replace('"x": 1, ', ""), False),
        (CALL.replace('"x": 1', '"x": "1"'), False),
        (CALL.replace("}}", "}"), False),
        (f"{CALL}\n{CALL}", False),
        (f"b\n{CALL}", False),
        ("b", False),
    ],
)
def test_a_call_must_have_the_function_and_all_arguments(
    text: str, right: bool, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert is_right(Example(PROMPT, CALL, frozenset()), text, tokenizer) is right


@pytest.mark.parametrize(("text", "right"), [("Hello b.", True), ("Hello c.", False), (CALL, False)])
def test_a_text_must_be_the_same(text: str, right: bool, tokenizer: PreTrainedTokenizerFast) -> None:
    assert is_right(Example(PROMPT, "Hello b.", frozenset()), text, tokenizer) is right


def test_kinds_of_examples() -> None:
    after = tool_chat.prompt([{"role": "tool", "content": "1"}], [])
    answers = [(PROMPT, CALL), (PROMPT, f"{CALL}\n{CALL}"), (PROMPT, "no"), (after, "It is 1."), (after, CALL)]
    kinds = [kind_of(Example(prompt, answer, frozenset())) for prompt, answer in answers]
    assert kinds == ["one call", "two calls", "no call", "after results", "one call"]
