"""Conversations, presets, attached files, adapters from files, and errors in words."""

import json
from pathlib import Path
from typing import Any

import pytest

from lorikeet.adapters.keys import sha256
from tests.e2e.page.browsing import TEXT, Server, Visit, until, wait_for

pytestmark = pytest.mark.long


def titles(page: Any) -> list[str]:
    return list(page.locator(".history-open").all_inner_texts())


def test_conversations_are_searched_and_renamed(visit: Visit, server: Server) -> None:
    server.serving.says("about parrots", "about stones", ends=True)
    page = visit.open()
    for prompt in ("First", "Second"):
        visit.complete(prompt, "Chat")
        visit.finished()
        visit.press("New conversation")
    page.get_by_label("Search conversations").fill("parrots")
    until(page, "document.querySelectorAll('.history-open').length === 1")
    assert titles(page) == ["First"]
    page.get_by_label("Rename First").click()
    page.keyboard.type("Birds <b>")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.history-open')?.textContent === 'Birds <b>'")
    page.get_by_label("Search conversations").fill("nothing like it")
    page.get_by_text("No conversation has these words.").wait_for()
    page.get_by_label("Search conversations").fill("")
    page.reload()
    page.wait_for_selector("[data-ready]")
    until(page, "document.querySelectorAll('.history-open').length === 2")
    assert sorted(titles(page)) == ["Birds <b>", "Second"]


def test_exported_conversations_are_imported(browser: Any, server: Server, tmp_path: Path) -> None:
    server.serving.says("one", ends=True)
    path = tmp_path / "conversations.json"
    with Visit(browser, server.url) as visit:
        page = visit.open()
        visit.complete("First", "Chat")
        visit.finished()
        with page.expect_download() as download:
            visit.press("Export")
        download.value.save_as(path)
    with Visit(browser, server.url) as visit:
        page = visit.open()
        for expected in ("1 conversation was added.", "All conversations of this file are here already."):
            page.locator(".history-foot input").set_input_files(path)
            page.get_by_text(expected).wait_for()
        visit.press("First")
        assert visit.finished() == "one"
        path.write_text('[{"id": "x"}]')
        page.locator(".history-foot input").set_input_files(path)
        page.get_by_text("conversations.json is not a file that Export wrote.").wait_for()
        assert titles(page) == ["First"]


def test_a_preset_keeps_settings(visit: Visit) -> None:
    page = visit.open()
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("System prompt").fill("Be brief")
    page.get_by_label("Save these settings as a preset").click()
    page.keyboard.type("Brief")
    page.keyboard.press("Enter")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("System prompt").fill("")
    page.reload()
    page.wait_for_selector("[data-ready]")
    page.get_by_label("Preset", exact=True).select_option("Brief")
    assert page.get_by_label("Temperature").input_value() == "0.7"
    assert page.get_by_label("System prompt").input_value() == "Be brief"
    page.get_by_label("Delete this preset").click()
    assert page.get_by_label("Preset", exact=True).locator("option").all_inner_texts() == ["None"]


def test_a_text_file_goes_with_the_message(visit: Visit, server: Server, tmp_path: Path) -> None:
    page = visit.open()
    visit.press("Chat")
    (tmp_path / "notes.md").write_text("uses ``` itself\n")
    (tmp_path / "picture.bin").write_bytes(b"\x89\x00\xff")
    page.locator(".composer input[type=file]").set_input_files([tmp_path / "notes.md", tmp_path / "picture.bin"])
    page.get_by_text("picture.bin is not a text file.").wait_for()
    page.fill("#prompt", "Sum up")
    page.keyboard.press("Enter")
    visit.finished()
    assert server.prompt() == "[user]Sum up\n\nnotes.md:\n````\nuses ``` itself\n````[assistant]"
    assert page.inner_text(".prompt-text") == "Sum up" and page.inner_text(".bubble .file-tag") == "notes.md"
    page.focus("#prompt")
    page.keyboard.press("ArrowUp")
    assert page.input_value("#prompt") == "Sum up"
    assert page.locator(".attachments li").all_inner_texts() == ["notes.md"]


def test_an_adapter_is_loaded_from_files(browser: Any, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    with Server(tmp_path, adapters=True, admin_key_sha256=sha256("root")) as server:
        server.serving.says(TEXT, ends=True)
        with Visit(browser, server.url) as visit:
            page = visit.open()
            page.click(".adapter-button")
            visit.press("Load from files…")
            page.get_by_text("This needs the admin key of the server.").wait_for()
            page.get_by_role("button", name="Enter the key").click()
            page.fill("dialog input[type=password]", "root")
            with page.expect_navigation():
                page.keyboard.press("Enter")
            page.wait_for_selector("[data-ready]")
            page.click(".adapter-button")
            visit.press("Load from files…")
            page.get_by_label("Name of the adapter").fill("mine")
            chooser = page.locator("dialog[open] input[type=file]").last
            chooser.set_input_files([tmp_path / "adapter_model.safetensors"])
            page.get_by_text("adapter_config.json is missing").wait_for()
            chooser.set_input_files([tmp_path / "adapter_config.json"])
            page.get_by_role("button", name="Load", exact=True).click()
            until(page, "document.querySelector('.adapter-button').textContent === 'mine'")
            visit.complete()
            assert visit.finished() == TEXT
            assert (server.serving.roots / "mine" / "adapter_model.safetensors").is_file()
            assert server.serving.shard.submits[-1].adapter.digest


def test_a_wrong_key_is_said_in_the_dialog(browser: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"- {{name: one, sha256: {sha256('right')}}}\n")
    with Server(tmp_path, keys_path=str(keys)) as server:
        visit = Visit(browser, server.url)
        page = visit.page
        page.goto(server.url)
        page.fill("dialog input[type=password]", "wrong")
        page.keyboard.press("Enter")
        page.locator("dialog[open]").get_by_text("The server does not accept this key.").wait_for()
        page.fill("dialog input[type=password]", "right")
        page.keyboard.press("Enter")
        page.wait_for_selector("[data-ready]")
        visit.context.close()


def test_a_loading_model_is_waited_for(visit: Visit) -> None:
    """The message can be written meanwhile, and nothing is sent."""
    is_ready = False

    def answer(route: Any) -> None:
        content = route.fetch().json()
        route.fulfill(json={**content, "ready": is_ready, "version": content["version"] if is_ready else None})

    visit.page.route("**/v1/capabilities", answer)
    page = visit.open()
    page.get_by_text("The model is loading: ").wait_for()
    page.fill("#prompt", "Hello")
    page.press("#prompt", "Enter")
    assert page.get_by_role("button", name="Send").is_disabled() and page.locator(".answer").count() == 0
    is_ready = True
    wait_for(page, lambda: page.get_by_role("button", name="Send").is_enabled())
    assert page.locator(".server-state").is_hidden()
    page.press("#prompt", "Enter")
    assert visit.finished() == TEXT
    page.unroute_all(behavior="ignoreErrors")


def test_only_a_message_or_a_file_can_be_sent(visit: Visit) -> None:
    page = visit.open()
    send = page.get_by_role("button", name="Send")
    assert send.is_disabled() and send.get_attribute("title") == "Write something first"
    page.fill("#prompt", "  ")
    assert send.is_disabled()
    page.fill("#prompt", "Hello")
    wait_for(page, send.is_enabled)
    page.fill("#prompt", "")
    assert send.is_disabled()
    page.locator(".composer input[type=file]").set_input_files(
        {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"A note"}
    )
    wait_for(page, send.is_enabled)


def test_a_server_that_does_not_answer_is_said(visit: Visit) -> None:
    """One that accepts connections and sends nothing, too; and that it is there again."""
    page = visit.open()
    page.fill("#prompt", "Hello")
    wait_for(page, lambda: page.get_by_role("button", name="Send").is_enabled())
    held: list[Any] = []
    page.route("**/v1/capabilities", lambda route: held.append(route))  # noqa: PLW0108 - playwright marks functions
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.get_by_text("The server has not answered for").wait_for()
    assert held and page.get_by_role("button", name="Send").is_disabled()
    page.unroute_all(behavior="ignoreErrors")
    visit.press("Try now")
    wait_for(page, lambda: page.get_by_role("button", name="Send").is_enabled())


EXPLAINED = [
    ((404, "there is no adapter 'x': did you mean 'y'?", 0), "x", "The server has no adapter “x”. Did you mean 'y'?"),
    (
        (429, "Model is overloaded", 4.2),
        "",
        "The queue is full: more people ask than the server takes at once. Try again in",
    ),
    ((401, "no", 0), "", "The server does not accept this key."),
    ((503, "No shard is ready", 5), "", "The model is not ready yet. Try again in 5 seconds."),
    ((422, "Input validation error: `x` is wrong", 0), "", "`x` is wrong"),
    ((None, "Failed to fetch", 0), "", "The server does not answer. Your message is kept here"),
]


def test_errors_say_what_to_do(visit: Visit) -> None:
    page = visit.open()
    for (status, message, retry), adapter, expected in EXPLAINED:
        problem = json.dumps({"status": status, "message": message, "retryAfter": retry})
        text = page.evaluate(
            f"import('./ui/assets/problems.js').then(({{ explain }}) => explain({problem}, {json.dumps(adapter)})[0])"
        )
        assert text.startswith(expected)
