"""Chat templates of real models, read from published packages: calls are rendered, and parsed back from that.

The packages are installed without their dependencies. No template is part of this project.
"""

import ast
import contextlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lorikeet.router.output.formats import ResponseTemplate, format_of, syntax_of
from lorikeet.router.output.parser_worker import OutputParser
from lorikeet.router.text.chat_template import ChatTemplate, TemplateOptions
from tests.package_environments import unpacked

pytestmark = pytest.mark.long

PACKAGES = ("trl==1.16.0", "axolotl==0.19.0")
FAMILIES = {
    "Qwen 2.5": "trl/chat_templates/qwen2_5.jinja",
    "Qwen 3": "trl/chat_templates/qwen3.jinja",
    "Qwen 3 2507": "trl/chat_templates/qwen3_instruct_2507.jinja",
    "Qwen 3.5": "trl/chat_templates/qwen3_5_nothink.jinja",
    "Qwen 3.5 thinking": "trl/chat_templates/qwen3_5_think.jinja",
    "Nemotron 3": "trl/chat_templates/nemotron_3_nano.jinja",
    "Llama 3.1": "trl/chat_templates/llama3_1.jinja",
    "Llama 3.2": "trl/chat_templates/llama3_2.jinja",
    "Llama 4": "axolotl/utils/chat_templates/templates/llama4.jinja",
    "Mistral 3": "axolotl/utils/chat_templates/templates/mistral_v2v3.jinja",
    "Mistral Tekken": "axolotl/utils/chat_templates/templates/mistral_v3_tekken.jinja",
    "gpt-oss": "trl/chat_templates/gptoss.jinja",
    "GLM 4": "trl/chat_templates/glm4moe.jinja",
    "Gemma 4": "trl/chat_templates/gemma4_v5.jinja",
    "EXAONE 4": "axolotl/utils/chat_templates/templates/exaone4.jinja",
    "Jamba": "axolotl/utils/chat_templates/templates/jamba.jinja",
    "Command": "axolotl/utils/chat_templates/templates/command_a_tool_use.jinja",
}
NOT_ENFORCED = {"Gemma 4"}
OWN = {
    "qwen3_template": "qwen3.jinja",
    "llama3_template": "llama3_1.jinja",
    "gptoss_template": "gptoss.jinja",
    "gemma4_template": "gemma4_v5.jinja",
}
"""Published response templates, and the chat template that each is for."""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A function",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where"},
                    "days": {"type": "integer", "description": "How long"},
                },
                "required": ["city"],
            },
        },
    }
    for name in ("get_weather", "get_news")
]
ARGUMENTS = {"city": "San José", "days": 3}
USER = {"role": "user", "content": "The weather?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "id": "abcdef123", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "name": "get_weather", "content": '{"sky": "gray"}'}


@cache
def source(path: str) -> str:
    return (unpacked("chat-templates", PACKAGES) / path).read_text()


@cache
def own_templates() -> dict[str, Any]:
    """Assignments of dictionaries in a module, which is not executed."""
    tree = ast.parse(source("trl/chat_template_utils.py"))
    templates: dict[str, Any] = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        kinds = {type(node_type) for node_type in ast.walk(node.value)}
        if kinds <= {ast.Dict, ast.List, ast.Constant, ast.Name, ast.Load, ast.BinOp, ast.Add}:
            code = compile(ast.Expression(node.value), "templates", "eval")
            with contextlib.suppress(NameError):
                templates[node.targets[0].id] = eval(code, {"__builtins__": {}}, templates)  # noqa: S307 - no calls
    return templates


def rendered(template: ChatTemplate, messages: list[dict[str, Any]], *, prompts: bool = True) -> str:
    return template.render(messages, TemplateOptions({"tools": TOOLS, "add_generation_prompt": prompts}))


def check(path: str, form: ResponseTemplate) -> None:
    """The call as the template writes it is parsed back, in the first and in a later turn, in any parts."""
    template = ChatTemplate(source(path), TOKENS)
    assert not template.problem
    for before in ([USER], [USER, CALL, RESULT, {"role": "assistant", "content": "Gray."}, USER]):
        prompt = rendered(template, before)
        whole = rendered(template, [*before, CALL], prompts=False)
        num_shared = next(at for at, letter in enumerate(whole) if not prompt.startswith(letter, at))
        text = whole[num_shared:].removesuffix("</s>")  # which ends the output
        for size in (len(text), 1, 5):
            parser = OutputParser(form.template, form.prefix(prompt), TOOLS)
            pieces = [piece for at in range(0, len(text), size) for piece in parser.feed(text[at : at + size])]
            calls = [piece[1:] for piece in [*pieces, *parser.finish()] if piece[0] == "call"]
            assert [(name, json.loads(arguments)) for name, arguments in calls] == [("get_weather", ARGUMENTS)], text
    assert "sky" in rendered(template, [USER, CALL, RESULT])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_is_parsed_back_from_a_real_template(family: str) -> None:
    form = format_of(source(FAMILIES[family]))
    assert form is not None and form.has_tools
    check(FAMILIES[family], form)
    assert (syntax_of(form) is None) == (family in NOT_ENFORCED)


@pytest.mark.parametrize("name", OWN)
def test_a_call_is_parsed_back_with_a_published_response_template(name: str) -> None:
    check(f"trl/chat_templates/{OWN[name]}", ResponseTemplate(own_templates()[name]))


def test_there_are_at_least_eight_families() -> None:
    texts = {Path(path).name for path in FAMILIES.values()}
    assert len(texts) == len(FAMILIES) >= 8
