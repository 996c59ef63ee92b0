"""What is shown of answers: tokens by source, details, differences of two sides; and what can be done with them."""

import json
from pathlib import Path
from typing import Any

import pytest

from lorikeet.proto import shard_pb2 as pb
from tests.e2e.page.browsing import TEXT, Server, Visit, until
from tests.router.scripted_shard import Script

pytestmark = pytest.mark.long

SOURCES = ("target", "history", "medusa", "draft", "grammar", "lookup")


HOSTILE = (
    "**bold** <img src=x onerror=alert(1)> <script>alert(2)</script> [a](javascript:alert(3)) ![b](http://other.test/b.png)"
    "\n\n<b>block</b>\n\n```html\n<script>alert(4)</script>\n```\n"
)


def test_a_script_in_an_answer_is_text(visit: Visit, server: Server) -> None:
    server.serving.says(HOSTILE, ends=True)
    page = visit.open()
    visit.complete(mode="Chat")
    visit.finished()
    page.get_by_label("Tokens and figures").click()
    page.wait_for_selector(".prose .hljs-name")
    assert page.inner_html(".prose strong") == "bold"
    assert page.locator(".prose img, .prose script, .prose b, .prose [href^=javascript]").count() == 0
    text = page.inner_text(".prose")
    written = ("<img src=x onerror=alert(1)>", "<script>alert(2)</script>", "<b>block</b>", "<script>alert(4)</script>")
    assert not [part for part in written if part not in text]
    assert page.get_attribute(".prose a", "href") == "http://other.test/b.png", "an image is a link: nothing is loaded"


def test_markdown_is_rendered_and_its_code_is_copied(visit: Visit, server: Server) -> None:
    table, code = "| a | b |\n|---|--:|\n| 1 | 2 |", "```python\ndef f(): pass\n```"
    server.serving.says(f"# Title\n\n- one\n- two\n\n{table}\n\n{code}\n\nEnd", ends=True)
    visit.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = visit.open()
    visit.complete(mode="Chat")
    visit.finished()
    page.get_by_label("Tokens and figures").click()
    page.wait_for_selector(".prose .hljs-keyword")
    assert page.inner_text(".prose h3") == "Title"
    assert page.locator(".prose li").all_inner_texts() == ["one", "two"]
    assert page.locator(".prose td").all_inner_texts() == ["1", "2"]
    page.get_by_label("Copy code").click()
    page.wait_for_selector("[aria-label=Copied]")
    assert page.evaluate("navigator.clipboard.readText()") == "def f(): pass"


def test_every_source_has_a_colour_and_a_number(visit: Visit, server: Server) -> None:
    ids = server.serving.ids("abcdefg")
    sources = [
        pb.SOURCE_PREFILL,
        pb.SOURCE_HISTORY,
        pb.SOURCE_MEDUSA,
        pb.SOURCE_DRAFT,
        pb.SOURCE_GRAMMAR,
        pb.SOURCE_LOOKUP,
        pb.SOURCE_BONUS,
    ]
    output = pb.RequestOutput(
        token_ids=ids,
        sources=bytes(sources),
        step_ends=bytes([1, 0, 0, 0, 0, 0, 1]),
        num_drafted=[1, 1, 1, 1, 1],
        num_accepted=5,
        logprobs=[-0.5] * 7,
        alternative_ids=[token for token in ids for _ in range(3)],
        alternative_logprobs=[-0.5] * 21,
        finish_reason=pb.FINISH_LENGTH,
    )
    server.serving.shard.answer = lambda submit: Script([], outputs=[output])
    page = visit.open()
    visit.complete()
    assert visit.finished() == "abcdefg"
    shown = page.evaluate(
        """[...document.querySelectorAll('.token')].map(
        (each) => [each.className, getComputedStyle(each).backgroundColor])"""
    )
    assert [names.split()[1] for names, _ in shown] == [*SOURCES, "target"]
    assert len({colour for _, colour in shown}) == 6, "each has its own"
    legend = page.inner_text(".legend")
    for name, count in (("Model", 2), ("Lookup", 1), ("History", 1), ("Medusa", 1), ("Draft", 1), ("Grammar", 1)):
        assert f"{name} {count}" in legend
    assert "3.50" in page.inner_text(".stats"), "seven tokens in two steps"
    page.hover(".token.grammar")
    assert "Grammar: the only token that the grammar allowed" in page.inner_text(".token-detail")


def test_the_details_of_a_token(visit: Visit, server: Server) -> None:
    """Excluded tokens have the log probability -inf, which is null in JSON."""
    none = float("-inf")
    first, second, third = ids = server.serving.ids("abc")
    output = pb.RequestOutput(
        token_ids=ids,
        sources=bytes([pb.SOURCE_PREFILL, pb.SOURCE_TARGET, pb.SOURCE_TARGET]),
        step_ends=bytes([1, 1, 1]),
        logprobs=[-0.5, 0.0, none],
        alternative_ids=[first, second, third, second, first, third, first, second, third],
        alternative_logprobs=[-0.5, -1.0, -3.0, 0.0, none, none, none, none, none],
        finish_reason=pb.FINISH_LENGTH,
    )
    server.serving.shard.answer = lambda submit: Script([], outputs=[output])
    page = visit.open()
    visit.complete()
    visit.finished()

    def hovered(number: int) -> tuple[str, list[str]]:
        page.hover(f".token:nth-child({number})")
        return page.inner_text(".token-detail"), page.locator(".others li").all_inner_texts()

    detail, others = hovered(1)
    assert f"token 1, id {first}" in detail and "log probability -0.500 (60.7 %)" in detail
    assert "Model: computed by the model itself" in detail
    assert [other.split() for other in others] == [["a", "60.7", "%"], ["b", "36.8", "%"], ["c", "5.0", "%"]]
    tokens, details = page.locator(".tokens").bounding_box(), page.locator(".token-detail").bounding_box()
    assert details["y"] >= tokens["y"] + tokens["height"], "the details cover no token"
    widths = page.evaluate("[...document.querySelectorAll('.bar-value')].map((bar) => bar.offsetWidth)")
    assert widths[0] > widths[1] > widths[2] > 0
    detail, others = hovered(2)
    assert "log probability 0.000 (100.0 %)" in detail or "log probability -0.000 (100.0 %)" in detail
    assert [other.split() for other in others] == [["b", "100.0", "%"], ["a", "excluded"], ["c", "excluded"]]
    detail, others = hovered(3)
    assert "no log probability" in detail and "100" not in detail
    assert [other.split()[1] for other in others] == ["excluded"] * 3


def choose(page: Any, name: str) -> None:
    """Choose an adapter for the last side."""
    page.locator(".adapter-button").last.click()
    page.wait_for_selector(".picker-row")
    page.fill("dialog[open] input", name)
    page.keyboard.press("Enter")


def test_the_first_difference_of_two_adapters_is_marked(browser: Any, adapting: Server) -> None:
    texts = {"first": "12345678", "second": "12345x78"}
    serving = adapting.serving
    serving.shard.answer = lambda submit: Script(serving.ids(texts[submit.adapter.id]))
    with Visit(browser, adapting.url) as visit:
        page = visit.open()
        choose(page, "first")
        visit.press("Compare")
        choose(page, "second")
        visit.complete()
        visit.finished(2)
        assert visit.texts() == list(texts.values())
        assert page.locator(".answer h2").all_inner_texts()[0] == "first · with drafts"
        assert page.locator(".answer h2").all_inner_texts()[1].startswith("second")
        assert page.locator(".token.differs").all_inner_texts() == ["6", "x"]
        assert all("First difference: token 6." in note for note in page.locator(".answer-note").all_inner_texts())
        texts["second"] = texts["first"]
        visit.complete()
        visit.finished(2)
        assert page.locator(".token.differs").count() == 0
        assert all("Both answers are the same." in note for note in page.locator(".answer-note").all_inner_texts())


def test_regenerate_replaces_the_answer_and_what_follows(visit: Visit, server: Server) -> None:
    server.serving.says("one", "two", "three", ends=True)
    page = visit.open()
    visit.complete("First", "Chat")
    visit.finished()
    visit.complete("Second", "Chat")
    visit.finished(2)
    assert visit.texts() == ["one", "two"]
    visit.press("Regenerate")
    until(page, "document.querySelectorAll('.answer').length === 1 && !document.querySelector('.answer.running')")
    assert visit.texts() == ["three"]
    assert server.prompt() == "[user]First[assistant]"
    assert server.serving.shard.submits[-1].seed != server.serving.shard.submits[0].seed
    page.reload()
    page.wait_for_selector("[data-ready]")
    assert visit.texts() == ["three"]


def test_regenerate_and_edit_stop_what_runs_below(visit: Visit, server: Server) -> None:
    page = visit.open()
    for button in ("Regenerate", "Edit"):
        server.serving.says("one", ends=True)
        visit.press("New conversation")
        visit.complete("First", "Chat")
        visit.finished()
        server.serving.says("two", hangs=True)
        visit.complete("Second", "Chat")
        until(page, "document.querySelectorAll('.answer.running .token').length > 1")
        hanging = server.serving.shard.submits[-1].id
        server.serving.says("three", ends=True)
        visit.press(button)
        page.wait_for_timeout(500)
        assert hanging in server.serving.shard.abort_ids


def test_edit_takes_a_prompt_back(visit: Visit, server: Server) -> None:
    server.serving.says("one", "two", "three", ends=True)
    page = visit.open()
    visit.complete("First", "Chat")
    visit.finished()
    visit.complete("Second", "Chat")
    visit.finished(2)
    page.get_by_role("button", name="Edit").last.click()
    assert page.input_value("#prompt") == "Second" and visit.texts() == ["one"]
    page.wait_for_timeout(600)
    page.reload()
    page.wait_for_selector("[data-ready]")
    assert page.input_value("#prompt") == "Second" and visit.texts() == ["one"]
    page.fill("#prompt", "Third")
    page.keyboard.press("Control+Enter")
    visit.finished(2)
    assert server.prompt() == "[user]First[assistant]one[user]Third[assistant]"
    assert visit.texts() == ["one", "three"]


def test_a_prompt_that_is_not_sent_survives_a_reload(visit: Visit) -> None:
    page = visit.open()
    visit.press("Chat")
    page.locator("#prompt").press_sequentially("Half of a prompt")
    page.wait_for_timeout(600)
    page.reload()
    page.wait_for_selector("[data-ready]")
    assert page.input_value("#prompt") == "Half of a prompt"
    visit.press("Send")
    assert visit.finished() == TEXT
    page.wait_for_timeout(600)
    page.reload()
    page.wait_for_selector("[data-ready]")
    assert page.input_value("#prompt") == ""
    page.locator("#prompt").press_sequentially("And more")
    visit.press("New conversation")
    assert page.input_value("#prompt") == ""
    visit.press("Half of a prompt")
    until(page, "document.getElementById('prompt').value === 'And more'")


def test_conversations_are_opened_exported_and_deleted(visit: Visit, server: Server, tmp_path: Path) -> None:
    server.serving.says("one", "two", ends=True)
    page = visit.open()
    visit.complete("First")
    visit.finished()
    visit.press("New conversation")
    visit.complete("Second", "Chat")
    visit.finished()
    titles = page.locator(".history-open")
    assert titles.all_inner_texts() == ["Second", "First"]
    visit.press("First")
    until(page, "document.querySelector('.tokens').textContent.startsWith('one')")
    assert page.locator(".history-open[aria-current]").all_inner_texts() == ["First"]
    assert page.input_value("#prompt") == "First", "a text that is completed is there to go on with"
    with page.expect_download() as download:
        visit.press("Export")
    download.value.save_as(tmp_path / "export.json")
    exported = json.loads((tmp_path / "export.json").read_text())
    found = {each["title"]: each["turns"][0]["answers"][0]["text"] for each in exported}
    assert download.value.suggested_filename == "lorikeet-conversations.json"
    assert found == {"First": "one", "Second": "two"}
    visit.press("Delete First")
    until(page, "document.querySelectorAll('.history-open').length === 1")
    assert page.locator(".answer").count() == 0, "the open one was deleted"
    assert page.evaluate("document.activeElement.textContent") == "Second", "the focus is not lost"
    page.on("dialog", lambda dialog: dialog.accept())
    visit.press("Delete all")
    until(page, "document.querySelectorAll('.history-open').length === 0")
    page.reload()
    page.wait_for_selector("[data-ready]")
    assert page.locator(".history-open").count() == 0
