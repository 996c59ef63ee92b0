"""Which commit a figure belongs to, and whether two commits differ in what could change a figure. Knows git only."""

import re
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"
"""Between these a README holds generated figures."""
READMES = ("README.md", "demo/README.md")
UNMEASURED = ("benchmarks/results/", "docs/LOG.md", "CHANGELOG.md")
"""What may differ between the commit that was measured and the one that claims it; a README's generated part too."""


def git(*arguments: str, repository: Path = REPOSITORY) -> str:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def head(repository: Path = REPOSITORY) -> str:
    return git("rev-parse", "HEAD", repository=repository).strip()


def changed(repository: Path = REPOSITORY) -> list[str]:
    """Measured files that differ from HEAD or are not known to git."""
    lines = git("status", "--porcelain", "--no-renames", "--untracked-files=all", repository=repository).splitlines()
    paths = [line[3:] for line in lines]
    return [path for path in paths if _is_measured(path) and not _only_figures(path, "HEAD", None, repository)]


def same_code(old: str, new: str, repository: Path = REPOSITORY) -> bool:
    """Whether two commits differ in nothing but results, generated figures, the log and the change log."""
    if old == new:
        return True
    try:
        paths = git("diff", "--name-only", "--no-renames", old, new, repository=repository).splitlines()
    except subprocess.CalledProcessError:
        return False
    return all(not _is_measured(path) or _only_figures(path, old, new, repository) for path in paths)


def without_figures(text: str) -> str:
    """A README without its generated part."""
    return re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), BEGIN + END, text, flags=re.DOTALL)


def _is_measured(path: str) -> bool:
    return not any(path == known or (known.endswith("/") and path.startswith(known)) for known in UNMEASURED)


def _only_figures(path: str, old: str, new: str | None, repository: Path) -> bool:
    """Whether it is a README that differs in its generated part alone; `new` None is the working tree."""
    if path not in READMES:
        return False
    try:
        after = (repository / path).read_text() if new is None else git("show", f"{new}:{path}", repository=repository)
        before = git("show", f"{old}:{path}", repository=repository)
    except (OSError, subprocess.CalledProcessError):
        return False
    return without_figures(before) == without_figures(after)
