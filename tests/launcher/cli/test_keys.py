"""`lorikeet-keys`: the file that it writes is the one that the server reads."""

from pathlib import Path

import pytest

from lorikeet.adapters import keys
from lorikeet.launcher.cli.keys import main


def test_keys_are_added_listed_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"

    def run(*words: str) -> str:
        assert main(["--file", str(path), *words]) == 0
        return capsys.readouterr().out.strip()

    limits = ("--adapters", "support", "triage", "--rate", "600", "--tokens", "1e5", "--concurrency", "32")
    key, root = run("add", "team-a", *limits), run("add", "ops", "--admin")
    assert key.startswith("sk-") and len(key) > 40 and key != root
    assert key not in path.read_text() and path.stat().st_mode & 0o777 == 0o600
    stored = keys.read(path).find(key)
    assert stored == keys.Key(
        "team-a",
        adapters=frozenset({"support", "triage"}),
        requests_per_minute=600.0,
        tokens_per_minute=1e5,
        concurrency=32,
    )
    assert keys.read(path).find(root) == keys.Key("ops", admin=True)
    assert [line.split()[0] for line in run("list").splitlines()] == ["team-a", "ops"]
    run("remove", "team-a")
    assert keys.read(path).find(key) is None and keys.read(path).knew(key)
    assert run("list") == "ops admin=True"
    assert run("add", "team-a") != key
    secret = run("add", "apart", "--isolate")
    isolated = keys.read(path).find(secret)
    assert isolated is not None and isolated.isolate and isolated.is_marked_isolate
    path.chmod(0o640)
    run("add", "third")
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["add", "one"], "given twice"),
        (["remove", "two"], "has no key 'two'"),
        (["add", "two", "--rate", "-1"], "above 0"),
        (["add", "two", "--concurrency", "0"], "above 0"),
    ],
)
def test_errors_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], part: str
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"- {{name: one, sha256: {'a' * 64}}}\n")
    assert main(["--file", str(path), *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("lorikeet-keys: ") and part in error and error.count("\n") == 1
    assert path.read_text() == f"- {{name: one, sha256: {'a' * 64}}}\n"


def test_the_file_may_follow_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.yaml"
    assert main(["add", "team", "--file", str(path)]) == 0
    assert main(["--file", str(path), "list"]) == 0
    assert "team" in capsys.readouterr().out
    assert main(["remove", "team", "--file", str(path)]) == 0
