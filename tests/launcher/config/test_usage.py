"""Destinations of usage records, and errors before anything starts."""

from pathlib import Path

import pytest

from lorikeet.launcher.config import rules
from lorikeet.launcher.config.rules import UsageDestinations
from lorikeet.launcher.config.settings import read
from lorikeet.launcher.exits import Exit, LauncherError


def planned(*arguments: str, **environment: str) -> UsageDestinations:
    return rules.usage_destinations(read(arguments, environment, "box"), environment)


def refusal(*arguments: str, **environment: str) -> str:
    with pytest.raises(LauncherError) as caught:
        planned(*arguments, **environment)
    assert caught.value.exit is Exit.ARGUMENT_VALIDATION
    return str(caught.value)


def test_there_are_no_usage_records_by_default() -> None:
    assert planned() == UsageDestinations(None, None)
    assert planned(REQUEST_LOGGER_URL="") == UsageDestinations(None, None)


def test_a_file_and_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    destinations = planned(
        "--usage-log", "usage.jsonl", "--log-texts", REQUEST_LOGGER_URL="http://me:secret@a.example/in"
    )
    assert destinations == UsageDestinations(str(tmp_path / "usage.jsonl"), "http://me:secret@a.example/in")
    assert "secret" not in repr(destinations)
    assert planned(USAGE_LOG=str(tmp_path / "b")).log == str(tmp_path / "b")


def test_log_texts_needs_a_destination() -> None:
    assert refusal("--log-texts") == "--log-texts needs --usage-log or REQUEST_LOGGER_URL: texts go to these only"


def test_an_unusable_file_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere" / "usage.jsonl"):
        assert refusal("--usage-log", str(path)) == f"--usage-log {path} is not a file in an existing folder"


@pytest.mark.parametrize("url", ["a.example", "ftp://a.example", "http://me:se/cret@a", "http://[secret"])
def test_an_error_does_not_repeat_the_url(url: str) -> None:
    assert refusal(REQUEST_LOGGER_URL=url) == "REQUEST_LOGGER_URL is not an http:// or https:// URL"
