"""`launch` without a model: spelling of flags, and errors of a server that does not start."""

import pytest

from lorikeet import launcher
from lorikeet.launcher.cli import launching
from lorikeet.launcher.config.settings import read
from lorikeet.proto.process import free_port
from tests.launcher.processes.test_supervisor import gone


def test_flags_are_spelled_as_the_launcher_reads_them() -> None:
    values = {"model-id": "-odd", "json-output": True, "prefix-caching": False, "speculative-tokens": 3}
    values |= {"cors-allow-origin": ["a", "b"], "strict-adapters": False, "max-total-tokens": None}
    words = [word for name, value in values.items() for word in launching.flag_words(name, value)]
    settings = read(words, {}, "box")
    assert set(settings.origins) == {
        "model-id", "json-output", "prefix-caching", "speculative-tokens", "cors-allow-origin"
    }  # fmt: skip
    assert (settings["model-id"], settings["json-output"], settings["prefix-caching"]) == ("-odd", True, False)
    assert (settings["speculative-tokens"], settings["cors-allow-origin"]) == (3, ("a", "b"))


def test_an_unknown_flag_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"has no flag --speculative-token$"), launcher.launch(speculative_token=3):
        pass


def test_the_error_includes_the_server_s_last_lines() -> None:
    with (
        pytest.raises(launching.LaunchError, match=r"(?s)exit code 4.*the folder /nowhere/at/all does not exist"),
        launcher.launch("/nowhere/at/all", port=str(free_port()), drain_timeout_s="1"),  # as on a command line
    ):
        pass


def test_a_server_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[int] = []

    class Noted(launching.Child):
        def __init__(self, *arguments: object, **named: object) -> None:
            super().__init__(*arguments, **named)  # type: ignore[arg-type]
            children.append(self.pid)

    monkeypatch.setattr(launching, "Child", Noted)
    with pytest.raises(launching.LaunchError, match=r"not ready within 0 s"), launcher.launch(start_timeout_s=0):
        pass
    assert children and all(gone(pid) for pid in children)


def test_what_the_package_offers() -> None:
    assert launcher.launch is launching.launch
    assert launcher.Client.__name__ == "Client"
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        launcher.lunch  # noqa: B018
