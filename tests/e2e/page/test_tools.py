"""Functions on the page: calls, their results, and lists of functions that are not valid."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.page.browsing import Server, Visit, until, violations
from tests.router.api.routes.test_tools import TEMPLATE as TOOL_TEMPLATE

pytestmark = pytest.mark.long

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "fahrenheit"}}\n</tool_call>'
FINAL = "It is 71 degrees and sunny in Oslo."


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model with a tool format."""
    with Server(tmp_path_factory.mktemp("calling"), chat_template=TOOL_TEMPLATE, adapters=True) as started:
        yield started


@pytest.mark.parametrize(("theme", "width"), [("light", 380), ("dark", 1380)])
def test_a_function_is_called_and_gets_its_result(
    browser: Any, calling: Server, axe: str, theme: str, width: int
) -> None:
    calling.serving.says(CALL, FINAL, ends=True, per_step=3)
    visit = Visit(browser, calling.url, color_scheme=theme, viewport={"width": width, "height": 800})
    page = visit.open()
    page.get_by_role("button", name="Call a function").press("Enter")
    until(page, "document.getElementById('prompt').value.includes('Oslo')")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".results")
    assert "[tools]get_weather add_reminder convert" in calling.prompt()
    assert page.inner_text(".call-head code") == "get_weather"
    assert page.locator(".arguments dd").all_inner_texts() == ['"Oslo"', '"fahrenheit"']
    assert page.locator(".token.lookup").count() > 5
    assert not violations(page, axe)
    page.get_by_label('Result of get_weather(city: "Oslo", unit: "fahrenheit")').press("Control+Enter")
    until(page, "document.querySelectorAll('.answer:not(.running)').length === 2")
    assert '[tool]{"temperature": 71, "sky": "sunny"}(get_weather)' in calling.prompt()
    assert page.locator(".tokens").last.text_content() == FINAL + "end"
    assert not violations(page, axe)
    page.get_by_role("button", name="Copy as code").last.click()
    code = page.inner_text("dialog[open]")
    assert '"tool_choice": "auto"' in code and '"role": "tool"' in code and "choice.delta.tool_calls" in code
    page.keyboard.press("Escape")
    page.reload()
    page.wait_for_selector("[data-ready]")
    assert page.locator(".answer").count() == 2 and page.locator(".results").count() == 0
    page.get_by_role("button", name="Edit").last.click()
    assert page.locator(".results textarea").input_value() == '{"temperature": 71, "sky": "sunny"}'
    visit.close()


def test_tools_that_are_not_valid_are_not_sent(browser: Any, calling: Server) -> None:
    visit = Visit(browser, calling.url)
    page = visit.open()
    tools = page.get_by_label("Tools", exact=True)
    for text, fault in (("[{", "This is not valid JSON"), ('[{"name": "a b"}]', "Function 1 needs a name")):
        tools.fill(text)
        page.fill("#prompt", "Hello")
        page.get_by_role("button", name="Send", exact=True).click()
        assert page.locator(".answer").count() == 0
        assert fault in str(tools.evaluate("(field) => field.validationMessage"))
    tools.fill('{"name": "one"}')
    assert page.get_by_text("one", exact=True).is_visible()
    visit.context.close()


def test_messages_of_two_sides_with_different_calls(visit: Visit) -> None:
    """B makes no call, so A alone gets a result; a side that is added later has A's turns."""
    page = visit.open()
    messages = page.evaluate(
        """async () => {
        const { messagesOf, sidesWithCalls } = await import('./ui/assets/playground/conversation.js');
        const answer = (side, text, calls = []) => ({ side, text, calls, settings: { system: '' } });
        const call = { id: 'x', name: 'f', arguments: '{}' };
        const called = { prompt: 'q', sides: 2, answers: [answer(0, '', [call]), answer(1, 'no')] };
        const results = { results: [{ text: 'r', calls: [[0, 'x']] }], sides: 2, answers: [answer(0, 'final')] };
        const next = { prompt: 'n', sides: 3, answers: [answer(0, ''), answer(1, ''), answer(2, '')] };
        const conversation = { turns: [called, results, next] };
        return [sidesWithCalls(called, 3), ...[0, 1, 2].map((side) => messagesOf(conversation, next, side))];
        }"""
    )
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    final = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "r"},
        {"role": "assistant", "content": "final"},
        {"role": "user", "content": "n"},
    ]
    plain = [final[0], {"role": "assistant", "content": "no"}, final[-1]]
    assert messages == [[0, 2], final, plain, final]
