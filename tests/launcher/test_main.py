"""The command line, up to the start of processes."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorikeet.launcher.__main__ import main
from lorikeet.launcher.exits import Exit
from lorikeet.launcher.processes import serving
from lorikeet.proto.version import version


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "HOSTNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODEL_ID", "lorikeet/base")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == Exit.OK
    assert capsys.readouterr().out == f"lorikeet {version()}\n"


def test_an_error_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--prot", "80"]) == Exit.ARGUMENT_VALIDATION
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "lorikeet-launcher: unknown flag --prot: did you mean --port?\n"


def test_the_effective_configuration_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-config", "--max-total-tokens", "100", "--ngrok-authtoken", "hunter2"]) == Exit.OK
    printed = capsys.readouterr()
    shown = json.loads(printed.out)
    assert shown["model"]["id"] == "lorikeet/base"
    assert (shown["flags"]["max-total-tokens"], shown["flags"]["max-input-length"]) == (100, 99)
    assert shown["given"]["max-total-tokens"] == "--max-total-tokens"
    assert "hunter2" not in printed.out + printed.err
    assert printed.err.count("has no effect") == 1


def test_impossible_lengths_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["--print-config", "--max-total-tokens", "100", "--max-input-length", "100"]) == Exit.ARGUMENT_VALIDATION
    )
    assert "--max-input-length 100 must be less than --max-total-tokens 100" in capsys.readouterr().err


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for Unix sockets, whose paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="lk") as folder:
        yield Path(folder)


def test_shard_uds_path_chooses_the_private_folder(short_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-config", "--shard-uds-path", str(short_path / "lorax-server")]) == Exit.OK
    assert list(short_path.iterdir()) == []  # removed again
    assert main(["--shard-uds-path", str(short_path / "none" / "server")]) == Exit.ARGUMENT_VALIDATION
    assert "no private folder can be created" in capsys.readouterr().err
    assert main(["--shard-uds-path", str(short_path / ("x" * 120))]) == Exit.ARGUMENT_VALIDATION
    assert "is too long for the path of a Unix socket" in capsys.readouterr().err


@pytest.mark.parametrize("hostname", ["203.0.113.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_an_error(hostname: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hostname", hostname, "--port", "18099"]) == Exit.WEBSERVER_CANNOT_START
    assert f"cannot listen on --hostname {hostname} --port 18099: " in capsys.readouterr().err


def test_a_port_in_use_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["--hostname", "127.0.0.1", "--port", port]) == Exit.WEBSERVER_CANNOT_START
    printed = capsys.readouterr()
    assert "it is in use by another process" in printed.err
    assert "loading" not in printed.out + printed.err


def test_the_runtime_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--env", "--print-config"]) == Exit.OK
    printed = capsys.readouterr()
    assert "python: 3." in printed.err
    assert json.loads(printed.out)["flags"]["env"] is True


def test_an_unwritable_receipts_file_is_an_error_at_startup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = tmp_path / "absent" / "receipts.jsonl"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    arguments = ["--receipts", str(absent), "--hostname", "127.0.0.1", "--port", port]
    assert main(arguments) == Exit.ARGUMENT_VALIDATION
    assert f"--receipts {absent} cannot be written: No such file or directory" in capsys.readouterr().err


def test_an_unwritable_pid_file_is_an_error_at_startup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = tmp_path / "absent" / "pid"
    assert main(["--pid-file", str(absent)]) == Exit.ARGUMENT_VALIDATION
    assert f"--pid-file {absent} cannot be written: No such file or directory" in capsys.readouterr().err


def test_the_pid_file_is_there_while_the_server_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "pid", []
    monkeypatch.setattr(serving, "serve", lambda *_: seen.append(path.read_text()) or Exit.OK)
    assert main(["--pid-file", str(path)]) == Exit.OK
    assert seen == [f"{os.getpid()}\n"] and not path.exists()


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["--no-such-flag"], ["--max-total-tokens", "0"]])
def test_a_command_line_without_a_server_imports_little(arguments: list[str]) -> None:
    """Each of these takes longer than the answer."""
    program = (
        "import sys; from lorikeet.launcher.__main__ import main; main(sys.argv[1:]);"
        "print(*sorted({'asyncio', 'grpc', 'huggingface_hub', 'pydantic', 'structlog', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == ""
