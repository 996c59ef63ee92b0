"""What the page asks for: settings in the request's body and in the shard, and code that asks for the same."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lorikeet.proto import shard_pb2 as pb
from tests.e2e.page.browsing import TEXT, Server, Visit, until
from tests.router.scripted_shard import Script

pytestmark = pytest.mark.long

MODES = {"Completion": "generate_stream", "Chat": "chat/completions"}
PROMPT = 'It\'s "quoted" for $HOME and `ls`\n\\n ü'


def sent(visit: Visit, mode: str, prompt: str = "Hello") -> dict[str, Any]:
    """The body of a request, without `parameters` around its settings; its answer must come."""
    with visit.page.expect_request(f"**/{MODES[mode]}") as request:
        visit.complete(prompt, mode)
    visit.finished()
    assert "bad" not in str(visit.page.get_attribute(".answer-note", "class")), visit.page.inner_text(".answer-note")
    body: dict[str, Any] = request.value.post_data_json
    return body.get("parameters") or body


@pytest.mark.parametrize("mode", MODES)
def test_settings_reach_the_request_and_the_shard(visit: Visit, server: Server, mode: str) -> None:
    page = visit.open()
    plain = sent(visit, mode)
    neutral = ("top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    assert not plain.keys() & {*neutral, "stop", "speculative_schedule", "speculative_history", "response_format"}
    assert plain["speculative_method"] == "auto"

    page.get_by_label("Method").select_option("lookup")
    page.get_by_label("Draft tokens per step").fill("2")
    page.get_by_label("Draft length").select_option("constant")
    page.get_by_label("Earlier outputs as drafts").select_option("on")
    page.get_by_label("Longest answer").fill("77")
    page.get_by_label("Stop strings").fill("END\nSTOP")
    page.get_by_label("Alternatives per token").fill("2")
    for name, value in (
        ("Temperature", "0.5"),
        ("Top p", "0.9"),
        ("Top k", "40"),
        ("Min p", "0.1"),
        ("Typical p", "0.8"),
        ("Seed", "7"),
        ("Repetition penalty", "1.2"),
        ("Frequency penalty", "0.3"),
        ("Presence penalty", "-0.4"),
    ):
        page.get_by_label(name, exact=True).fill(value)
    body = sent(visit, mode)
    limit, alternatives = (
        ("max_new_tokens", "return_k_alternatives") if mode == "Completion" else ("max_tokens", "top_logprobs")
    )
    expected = {
        "speculative_method": "lookup",
        "speculative_tokens": 2,
        "speculative_schedule": "constant",
        "speculative_history": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "typical_p": 0.8,
        "seed": 7,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.4,
        "stop": ["END", "STOP"],
        limit: 77,
        alternatives: 2,
    }
    assert {name: body.get(name) for name in expected} == expected
    submit = server.serving.shard.submits[-1]
    assert (submit.speculation.method, submit.speculation.num_tokens, submit.speculation.schedule) == (
        "lookup",
        2,
        "constant",
    )
    assert submit.tenant and submit.max_new_tokens == 77 and submit.logprobs.alternatives == 2
    sampling = submit.sampling
    shown = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.typical_p, sampling.repetition_penalty)
    assert [round(value, 3) for value in shown] == [0.5, 0.9, 0.1, 0.8, 1.2]
    assert [round(value, 3) for value in (sampling.frequency_penalty, sampling.presence_penalty)] == [0.3, -0.4]

    page.get_by_label("Method").select_option("off")
    off = sent(visit, mode)
    assert off["speculative_method"] == "off" and not off.keys() & {"speculative_tokens", "speculative_history"}
    assert page.get_by_label("Earlier outputs as drafts").is_disabled()


@pytest.mark.parametrize("mode", MODES)
def test_formats_reach_the_request(visit: Visit, mode: str) -> None:
    page = visit.open()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    as_json = (
        {"response_format": {"type": "json_object", "schema": schema}}
        if mode == "Completion"
        else {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}}
    )
    for name, text, expected in (
        ("json", json.dumps(schema), as_json),
        ("regex", "[a-z]+", {"guided_regex": "[a-z]+"}),
        ("choice", "yes\nno", {"guided_choice": ["yes", "no"]}),
        ("grammar", 'start: "yes"', {"guided_grammar": 'start: "yes"'}),
    ):
        page.get_by_label("Format").select_option(name)
        page.get_by_label("Grammar", exact=True).fill(text)
        body = sent(visit, mode)
        assert {key: body.get(key) for key in expected} == expected
    page.get_by_label("Format").select_option("json")
    page.get_by_label("Grammar", exact=True).fill("{")
    page.locator("#prompt").press("Control+Enter")
    fault = page.get_by_label("Grammar", exact=True).evaluate("(field) => field.validationMessage")
    assert "This is not valid JSON" in fault


def test_controls_offer_what_the_server_can_do(browser: Any, adapting: Server, tmp_path: Path) -> None:
    def methods(page: Any) -> dict[str, bool]:
        found = page.evaluate("[...document.querySelectorAll('option')].map((each) => [each.value, each.disabled])")
        return {name: not is_disabled for name, is_disabled in found if name in ("auto", "medusa", "draft")}

    with Server(tmp_path, speculative_tokens=3) as server, Visit(browser, server.url) as visit:
        page = visit.open()
        assert methods(page) == {"auto": True}, "without adapters there are no heads"
    with Visit(browser, adapting.url) as visit:
        page = visit.open()
        assert methods(page) == {"auto": True, "medusa": False}
        page.click(".adapter-button")
        page.wait_for_selector(".picker-row")
        page.keyboard.type("first")
        page.keyboard.press("Enter")
        assert methods(page) == {"auto": True, "medusa": True}
        page.get_by_label("Method").select_option("medusa")
        page.click(".adapter-button")
        page.wait_for_selector(".picker-row")
        page.keyboard.type("no adapter")
        page.keyboard.press("Enter")
        assert page.get_by_label("Method").input_value() == "auto"


def test_without_history_drafts_there_is_no_switch(visit: Visit) -> None:
    def answer(route: Any) -> None:
        content = route.fetch().json()
        content["speculation"]["history"] = False
        route.fulfill(json=content)

    visit.page.route("**/v1/capabilities", answer)
    page = visit.open()
    assert page.get_by_label("Draft length").count() == 1
    assert page.get_by_label("Earlier outputs as drafts").count() == 0


def test_adapters_may_have_a_chat_template_of_their_own(browser: Any, tmp_path: Path) -> None:
    folder = tmp_path / "roots" / "talks"
    folder.mkdir(parents=True)
    template = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
    files = {
        "adapter_config.json": "{}",
        "adapter_model.safetensors": "talks",
        "tokenizer_config.json": json.dumps({"chat_template": template}),
    }
    for name, content in files.items():
        (folder / name).write_text(content)
    with Server(tmp_path, adapters=True, chat_template=False) as server, Visit(browser, server.url) as visit:
        page = visit.open()
        chat = page.get_by_role("button", name="Chat", exact=True)
        assert chat.is_disabled() and "no chat template" in str(chat.get_attribute("title"))
        page.click(".adapter-button")
        page.wait_for_selector(".picker-row")
        page.keyboard.type("talks")
        page.keyboard.press("Enter")
        visit.complete("Hello", "Chat")
        assert visit.finished() == TEXT
        assert server.prompt() == "<Hello>"


def output_of(*command: str) -> tuple[int, str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**kept, "NO_PROXY": "127.0.0.1", "PYTHONUTF8": "1"},
    )
    return done.returncode, done.stdout, done.stderr


def codes(visit: Visit) -> list[str]:
    """The curl, the Python and the JavaScript code of the first answer."""
    visit.press("Copy as code")
    visit.page.wait_for_selector("dialog[open] pre")
    texts: list[str] = visit.page.locator("dialog[open] pre").all_text_contents()
    visit.page.keyboard.press("Escape")
    return texts


@pytest.mark.parametrize("mode", MODES)
def test_copied_code_gives_the_same_text(visit: Visit, server: Server, mode: str) -> None:
    visit.open()
    visit.page.get_by_label("Temperature").fill("0.5")
    visit.page.get_by_label("Frequency penalty").fill("0.5")
    visit.page.get_by_label("Min p").fill("0.1")
    visit.complete(PROMPT, mode)
    assert visit.finished() == TEXT
    curl, python, javascript = codes(visit)
    asked = server.serving.shard.submits[-1]

    status, stream, _ = output_of("bash", "-c", curl)
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    tokens = [json.loads(event) for event in events]
    if mode == "Completion":
        text = "".join(each["token"]["text"] for each in tokens if not each["token"]["special"])
    else:
        text = "".join(each["choices"][0]["delta"].get("content") or "" for each in tokens if each["choices"])
    assert (status, text) == (0, TEXT)
    assert output_of(sys.executable, "-c", python) == (0, TEXT, "")
    assert output_of("node", "--input-type=module", "-e", javascript) == (0, TEXT, "")
    for submit in server.serving.shard.submits[-3:]:
        assert (submit.prompt_ids, submit.sampling, submit.seed) == (asked.prompt_ids, asked.sampling, asked.seed)


@pytest.mark.parametrize("mode", MODES)
def test_copied_python_reports_errors(visit: Visit, server: Server, mode: str) -> None:
    page = visit.open()
    page.get_by_label("Method").select_option("lookup")
    visit.complete("Hello", mode)
    visit.finished()
    _, python, _ = codes(visit)
    server.serving.shard.answer = lambda submit: Script(server.serving.ids("abc"), error="the step failed")
    status, _, fault = output_of(sys.executable, "-c", python)
    assert status == 1 and "KeyError" not in fault and "step failed" in fault, fault
    status, _, fault = output_of(sys.executable, "-c", python.replace('"lookup"', '"none"'))
    assert status == 1 and "speculative_method" in fault, "errors before the stream are seen too"
    visit.press("Regenerate")
    until(page, "document.querySelector('.answer-note.bad')")
    assert "step failed" in page.inner_text(".answer-note")


def test_an_error_is_shown_with_the_tokens_before_it(visit: Visit, server: Server) -> None:
    server.serving.shard.answer = lambda submit: Script(
        [], outputs=[pb.RequestOutput(finish_reason=pb.FINISH_ERROR, error="no luck")]
    )
    page = visit.open()
    visit.complete()
    visit.finished()
    assert "no luck" in page.inner_text(".answer-note.bad")
