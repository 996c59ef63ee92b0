"""Chat templates render as model authors intend, and their errors become clear messages."""

import json
from pathlib import Path

import pytest

from lorikeet.router.errors import ChatTemplateError
from lorikeet.router.text.chat_template import ChatTemplate, TemplateOptions, find_template

MESSAGES = [{"role": "user", "content": "Grüße <b>"}]


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(MESSAGES, TemplateOptions(variables))


def test_special_tokens_and_variables() -> None:
    source = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] }}{% endfor %}{{ extra }}"
    assert render(source, extra="!") == "<s>[user] Grüße <b>!"


def test_blocks_are_trimmed() -> None:
    assert render("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n") == "user\n"


def test_a_generation_prompt_is_added_by_default() -> None:
    source = "{% if add_generation_prompt %}yes{% else %}no{% endif %}"
    assert render(source) == "yes"
    assert render(source, add_generation_prompt=False) == "no"


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ messages | tojson }}") == json.dumps(MESSAGES, ensure_ascii=False)
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_loop_controls_time_and_generation_blocks_work() -> None:
    assert render("{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}") == "1"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c") == "abuserc"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ missing.attribute }}", "missing"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% if %}", "line 1"),
    ],
)
def test_errors_of_templates(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(source)


def test_places_of_templates(tmp_path: Path) -> None:
    assert find_template(tmp_path, {}) is None
    several = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    assert find_template(tmp_path, {"chat_template": several}) == "D"
    assert find_template(tmp_path, {"chat_template": several[1:]}) == "T"
    assert find_template(tmp_path, {"chat_template": "C"}) == "C"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "J"}')
    assert find_template(tmp_path, {}) == "J"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert find_template(tmp_path, {"chat_template": "C"}) == "F"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}</end>{% endfor %}", "<user>Hi</end><assistant>It is "),
        ("{% for m in messages %}{{ m.content | trim }}|{% endfor %}", "Hi|It is"),
    ],
)
def test_a_final_message_is_continued(source: str, expected: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is "}]
    options = TemplateOptions(continue_final_message=True)
    assert ChatTemplate(source, {}).render(messages, options) == expected


def test_a_final_message_that_is_left_out_cannot_be_continued() -> None:
    with pytest.raises(ChatTemplateError, match="does not show the final message"):
        ChatTemplate("{{ messages[0].role }}", {}).render(MESSAGES, TemplateOptions(continue_final_message=True))


def test_variables_that_a_template_does_not_read() -> None:
    source = (
        "{% if effort is not defined %}{% set effort = 'low' %}{% endif %}{{ effort }}"
        "{% for document in documents %}{{ document.text }}{% endfor %}"
        "{% macro turn(role) %}{{ role }}{{ extra }}{% endmacro %}"
    )
    template = ChatTemplate(source, {})
    assert template.unread(["effort", "documents", "extra", "role", "text", "self"]) == ("role", "text", "self")
    assert template.render(MESSAGES, TemplateOptions({"effort": "high", "self": 1, "documents": []})) == "high"


def test_arguments_are_a_text_where_a_template_writes_them_as_one() -> None:
    """As DeepSeek's do; everywhere else they are an object."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call, {"function": {"arguments": "x"}}]}]
    source = (
        "{% set calls = messages[0].tool_calls %}{% set given = calls[0]['function']['arguments'] %}"
        "{{ '[' + given + ']' }}{{ given is mapping }}{{ given | tojson }}{{ given.a }}"
        "{{ '+' + calls[1].function.arguments }}"
    )
    assert ChatTemplate(source, {}).render(messages) == '[{"a": "é"}]True{"a": "é"}é+x'
    assert messages[0]["tool_calls"][0] == call
