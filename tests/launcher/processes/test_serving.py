"""What the launcher says before it starts processes, and what it waits for."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from lorikeet.launcher.processes import serving
from lorikeet.launcher.processes.supervisor import Signals


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


@pytest.mark.parametrize("has_router", [True, False])
def test_a_server_is_ready_once_its_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_router: bool
) -> None:
    """A router answers GET /ready a moment before its file exists, which says to the next one that it replaces one."""
    waited_for: list[Callable[[], bool]] = []

    class FakeSupervisor:
        def __init__(self, processes: object, is_ready: Callable[[], bool], *_: object) -> None:
            waited_for.append(is_ready)

        def run(self, *_: object) -> int:
            return 0

    class Settings(dict[str, Any]):
        origins: ClassVar[dict[str, str]] = {}

    router, shard = tmp_path / "router", SimpleNamespace(ready=tmp_path / "shard")
    monkeypatch.setattr(serving, "Supervisor", FakeSupervisor)
    plan: Any = SimpleNamespace(
        settings=Settings(dict.fromkeys(serving._SECRET_FILES) | {"drain-timeout-s": 1.0}),
        adapters=SimpleNamespace(warning="", s3_warning=""),
        has_router=has_router,
        model=SimpleNamespace(path=tmp_path),
        num_replicas=0,
        router_ready_file=router,
        shard_files=lambda: shard,
        preload=None,
    )
    address: Any = SimpleNamespace(scheme="http", is_ready=lambda: True)
    serving._run(plan, address, None, Signals(), None)  # type: ignore[arg-type]
    (is_ready,) = waited_for
    assert not is_ready()
    (router if has_router else shard.ready).touch()
    assert is_ready()
