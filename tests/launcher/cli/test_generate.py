"""`lorikeet-generate` against a server with scripted responses."""

import re
from typing import Any

import pytest

from lorikeet.launcher.cli import generate
from lorikeet.launcher.cli.client import AnswerToken
from lorikeet.launcher.cli.generate import main
from lorikeet.proto.draft_sources import SOURCE_NAMES
from tests.launcher.cli.test_client import Scripted, event, serving

REPORT = {
    "steps": 2,
    "drafted": 6,
    "accepted": 3,
    "sources": {"prefill": 1, "draft": 3, "bonus": 1},
    "draft_seconds": 0.25,
    "verify_seconds": 1.5,
    "accept_seconds": 0.125,
}


def run(scripted: Scripted, *arguments: str) -> int:
    with serving(scripted) as client:
        return main(["--url", client.url, *arguments])


def test_only_the_text_is_printed_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    scripted = Scripted(body=event(" a", source="draft") + event("</s>", special=True, full=" a"))
    assert run(scripted, "x", "--color", "always") == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (" a\n", "")
    assert scripted.asked[0][2] == {"inputs": "x", "parameters": {"details": True}}


def test_the_verbose_view_colours_tokens_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    details: dict[str, Any] = {"generated_tokens": 5, "speculation": REPORT}
    scripted = Scripted(body=event(" a", source="draft") + event(" b", source="bonus", full=" a b", details=details))
    assert run(scripted, "x", "-v", "--color", "always") == 0
    printed = capsys.readouterr()
    assert printed.out == "\x1b[31m a\x1b[0m\x1b[95m b\x1b[0m\n"
    line, legend = printed.err.splitlines()
    assert legend == "\x1b[32mprefill\x1b[0m \x1b[31mdraft\x1b[0m \x1b[95mbonus\x1b[0m"
    assert re.match(r"5 tokens in \d+\.\d\d s; 2 steps \(2\.50 tokens each\); accepted 3/6 \(50%\); ", line)
    assert line.endswith("; prefill 1, draft 3, bonus 1; draft 0.250 s, verify 1.500 s, accept 0.125 s")


def test_without_a_terminal_there_are_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Scripted(body=event(" a", source="lookup", full=" a")), "x", "-v") == 0
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert "without speculation" in printed.err


def test_every_option_of_a_request_is_its_field() -> None:
    scripted = Scripted(body=event(" a", full=" a"))
    options = "-M 9 --temperature 0.5 --top-k 3 --top-p 0.9 --repetition-penalty 1.1 -s 4 --stop end --stop . -g 2"
    options += " --ignore-eos-token --adapter-id a --adapter-source local --heads-id h --speculative-method draft"
    options += " --speculative-schedule constant --speculative-verification google"
    assert run(scripted, "x", *options.split()) == 0
    assert scripted.asked[0][2]["parameters"] == {
        "details": True,
        "do_sample": True,
        "max_new_tokens": 9,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "seed": 4,
        "stop": ["end", "."],
        "ignore_eos_token": True,
        "adapter_id": "a",
        "adapter_source": "local",
        "heads_id": "h",
        "speculative_tokens": 2,
        "speculative_method": "draft",
        "speculative_schedule": "constant",
        "speculative_verification": "google",
    }


def test_an_error_of_the_server_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Scripted(status=422, body=b'{"error": "`speculative_tokens` must be <= 16"}'), "x") == 1
    assert "lorikeet-generate: `speculative_tokens` must be <= 16" in capsys.readouterr().err


def test_a_connection_error_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["x", "--url", "http://127.0.0.1:1"]) == 1
    assert "cannot connect to http://127.0.0.1:1" in capsys.readouterr().err


def test_every_source_has_a_different_colour() -> None:
    paint = generate.painter(colours=True)
    painted = {paint(AnswerToken(1, "x", None, False, False, name)) for name in generate.COLOURS}
    assert len(painted) == len(generate.COLOURS) == len(SOURCE_NAMES)
    assert paint(AnswerToken(1, "x", None, False, False, None)) == "x"


def test_the_server_is_that_of_the_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Scripted(body=event(" a", full=" a"))) as client:
        monkeypatch.setenv("LORIKEET_URL", client.url.removeprefix("http://"))
        assert main(["x"]) == 0
    assert capsys.readouterr().out == " a\n"
    assert main(["x", "--url", "ftp://box"]) == 2
    assert capsys.readouterr().err.startswith("lorikeet-generate: 'ftp://box' is not the URL of a server")
