"""What the launcher says before it starts processes."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lorikeet.launcher.processes import serving


@pytest.mark.parametrize("name", serving._SECRET_FILES)
@pytest.mark.parametrize(("mode", "is_exposed"), [(0o644, True), (0o604, True), (0o640, False), (0o600, False)])
def test_secrets_that_others_can_read_are_warned_of(tmp_path: Path, name: str, mode: int, is_exposed: bool) -> None:
    path = tmp_path / "secret"
    path.write_text("secret")
    path.chmod(mode)
    os.chown(path, -1, os.getgid())
    settings: Any = dict.fromkeys(serving._SECRET_FILES) | {name: str(path)}
    secrets = serving.exposed_secrets(settings)
    assert len(secrets) == is_exposed
    if is_exposed:
        assert secrets == [f"others can read --{name} {path} (mode {mode:04o}): run chmod 600 on it"]
    assert serving.exposed_secrets({**settings, name: str(tmp_path / "absent")}) == []


def test_the_warning_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_text("secret")
    path.chmod(0o644)
    lines: list[str] = []

    class Stop(Exception):
        """The first warning is enough."""

    def warning(text: str, *values: object) -> None:
        lines.append(text % values)
        raise Stop

    plan: Any = SimpleNamespace(settings=dict.fromkeys(serving._SECRET_FILES) | {"admin-key-file": str(path)})
    log: Any = SimpleNamespace(warning=warning)
    with pytest.raises(Stop):
        serving._run(plan, None, None, None, log)  # type: ignore[arg-type]
    assert lines[0].startswith("secret_exposed: others can read --admin-key-file")
