"""Which commits count as the same measured code, in a repository of its own."""

from pathlib import Path

import pytest

from benchmarks.history import BEGIN, END, changed, git, head, same_code


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git("init", "-q", repository=tmp_path)
    git("config", "user.email", "someone@example.org", repository=tmp_path)
    git("config", "user.name", "Someone", repository=tmp_path)
    write(tmp_path, "shard/engine/engine.py", "step = 1\n")
    for name in ("README.md", "demo/README.md", "docs/README.md"):
        write(tmp_path, name, f"words\n{BEGIN}\nold figures\n{END}\nmore words\n")
    return tmp_path


def write(repository: Path, path: str, text: str) -> str:
    """Commit one file and return the commit."""
    target = repository / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    git("add", "-A", repository=repository)
    git("commit", "-q", "-m", path, repository=repository)
    return head(repository)


@pytest.mark.parametrize(
    ("path", "text", "same"),
    [
        ("benchmarks/results/proof.json", "[]", True),
        ("docs/LOG.md", "a line", True),
        ("CHANGELOG.md", "a line", True),
        ("README.md", f"words\n{BEGIN}\nnew figures\n{END}\nmore words\n", True),
        ("demo/README.md", f"words\n{BEGIN}\nnew figures\n{END}\nmore words\n", True),
        ("docs/README.md", f"words\n{BEGIN}\nnew figures\n{END}\nmore words\n", False),
        ("README.md", f"other words\n{BEGIN}\nold figures\n{END}\nmore words\n", False),
        ("shard/engine/engine.py", "step = 2\n", False),
        ("benchmarks/bars.py", "wanted = 0\n", False),
        ("docs/LOG.md.py", "x = 1\n", False),
    ],
)
def test_only_results_may_differ(repository: Path, path: str, text: str, same: bool) -> None:
    before = head(repository)
    after = write(repository, path, text)
    assert same_code(before, after, repository) is same
    assert same_code(after, after, repository)


def test_a_moved_file_is_a_change(repository: Path) -> None:
    before = head(repository)
    git("mv", "shard/engine/engine.py", "docs/LOG.md", repository=repository)
    git("commit", "-q", "-m", "move", repository=repository)
    assert not same_code(before, head(repository), repository)


def test_an_unknown_commit_is_not_the_same(repository: Path) -> None:
    assert not same_code("0" * 40, head(repository), repository)


def test_uncommitted_changes_are_named(repository: Path) -> None:
    assert changed(repository) == []
    (repository / "docs/LOG.md").write_text("a line")
    (repository / "README.md").write_text(f"words\n{BEGIN}\nnew\n{END}\nmore words\n")
    assert changed(repository) == []
    (repository / "shard/engine/engine.py").write_text("step = 3\n")
    (repository / "new.py").write_text("")
    assert sorted(changed(repository)) == ["new.py", "shard/engine/engine.py"]
