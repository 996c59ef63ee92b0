"""`lorikeet chat` against a server with scripted events."""

import io
import json
import re
from typing import Any

import pytest

from lorikeet.launcher.cli.chat import figures, main
from tests.launcher.cli.test_client import Scripted, serving

USAGE: dict[str, Any] = {
    "completion_tokens": 6,
    "completion_tokens_details": {
        "accepted_prediction_tokens": 3,
        "rejected_prediction_tokens": 1,
        "speculation": {"steps": 3},
    },
}


def events(*deltas: dict[str, str], end: bytes = b"data: [DONE]\n\n") -> bytes:
    data = [{"choices": [{"delta": delta}]} for delta in deltas]
    lines = [json.dumps(event) for event in [*data, {"choices": [], "usage": USAGE}]]
    return b"".join(b"data: " + line.encode() + b"\n\n" for line in lines) + end


HELLO = events({"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"})


def chat(scripted: Scripted, *arguments: str) -> int:
    with serving(scripted) as client:
        return main(["--url", client.url, "--model", "base", *arguments])


def sent(scripted: Scripted) -> list[dict[str, Any]]:
    return [body for path, _, body in scripted.asked if path == "/v1/chat/completions"]


def test_one_message_is_answered_with_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    scripted = Scripted(body=HELLO)
    assert chat(scripted, "Hi", "--system", "Be brief.", "--max-tokens", "9", "--temperature", "0") == 0
    [body] = sent(scripted)
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert (body["model"], body["max_tokens"], body["temperature"], body["stream"]) == ("base", 9, 0, True)
    text, line = capsys.readouterr().out.splitlines()
    assert text == "Hello"
    assert re.match(
        r"\[6 tokens, first after \d\.\d\d s, .*2\.00 tokens per step, 3 of 4 draft tokens accepted\]", line
    )


def converse(scripted: Scripted, lines: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return chat(scripted)


def test_a_conversation_keeps_its_messages_until_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = Scripted(body=HELLO)
    lines = "Hi\nAnd you?\n\n/adapter pirate\n/new\nAgain\n/system Short.\n/adapter\nLast\n/exit\nnever\n"
    assert converse(scripted, lines, monkeypatch) == 0
    first, second, third, fourth = sent(scripted)
    assert [message["content"] for message in second["messages"]] == ["Hi", "Hello", "And you?"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert (first["model"], third["model"], fourth["model"]) == ("base", "pirate", "base")
    assert third["messages"] == [{"role": "user", "content": "Again"}]
    assert fourth["messages"][0] == {"role": "system", "content": "Short."}


def test_without_a_name_the_model_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = Scripted(body=HELLO)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n/adapter\nAgain\n"))
    assert chat(scripted, "--adapter", "pirate") == 0
    assert [body["model"] for body in sent(scripted)] == ["pirate", "base"]


def test_the_listed_model_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = Scripted(body=HELLO, models=["listed", "pirate"])
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n/adapter\nAgain\n"))
    with serving(scripted) as client:
        assert main(["--url", client.url, "--adapter", "pirate"]) == 0
    assert [body["model"] for body in sent(scripted)] == ["pirate", "listed"]


def test_an_unknown_command_is_not_sent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    scripted = Scripted(body=HELLO)
    assert converse(scripted, "/adaptor x\n/help\n", monkeypatch) == 0
    printed = capsys.readouterr()
    assert "there is no command /adaptor" in printed.err and "/adapter NAME" in printed.out
    assert not sent(scripted)


@pytest.mark.parametrize(
    ("scripted", "said"),
    [
        (Scripted(404, b'{"error": {"message": "there is no adapter x"}}'), "there is no adapter x"),
        (Scripted(body=events({"content": "a"}, end=b"")), "the stream ended early"),
        (Scripted(body=b'data: {"error": {"message": "the shard was lost"}}\n\n'), "the shard was lost"),
        (Scripted(body=HELLO[:90], chunked=True), "the stream ended early"),
    ],
)
def test_an_error_is_one_sentence(scripted: Scripted, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(scripted, "Hi") == 1
    assert capsys.readouterr().err == f"lorikeet chat: {said}\n"


@pytest.mark.parametrize(
    ("scripted", "said"),
    [
        (Scripted(body=b'{"data": []}'), "the server lists no model"),
        (Scripted(body=b"{}"), "the server lists no model"),
        (Scripted(body=b"<html>"), "the answer to /v1/models is not JSON"),
        (Scripted(body=b"{", chunked=True), "the answer to /v1/models ended early"),
    ],
)
def test_the_first_model_is_asked_by_default(scripted: Scripted, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(scripted) as client:
        assert main(["--url", client.url, "Hi"]) == 1
    assert capsys.readouterr().err == f"lorikeet chat: {said}\n"


def test_reasoning_is_shown_but_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = Scripted(body=events({"reasoning_content": "hm"}, {"content": "yes"}))
    assert converse(scripted, "a\nb\n", monkeypatch) == 0
    assert sent(scripted)[1]["messages"][1] == {"role": "assistant", "content": "yes"}


def test_figures_leave_out_what_a_server_does_not_count() -> None:
    assert figures({"completion_tokens": 5}, 1.0, 1.5, 2.5) == "[5 tokens, first after 0.50 s, 4.0 tokens/s]"
