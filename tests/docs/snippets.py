"""The fenced blocks of the documentation, and a folder in which the commands of one page run.

`sh` and `python` blocks are executed in order; `json` and `yaml` blocks are parsed; `text` is not executed. A comment
before a block says more: `<!-- not run: reason -->`, `<!-- file: NAME -->` for a block that becomes a file, or
`<!-- output -->` for a block of text whose lines the block before it prints. A page whose first line is
`<!-- server: lorikeet/smollm2 -->` runs against the demo's model, other pages against lorikeet/base.
"""

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.e2e.launched import ROOT, free_port

BEFORE, INSIDE, OUTPUT = "not run: ", "file: ", "output"
DEMO_PAGE = "<!-- server: lorikeet/smollm2 -->\n"
ENDING = ("--help", "-h", "--version", "--print-config", "--download-only")
"""Flags with which the launcher does not serve."""
LANGUAGES = ("sh", "python", "json", "yaml", "text")
_FENCE = re.compile(
    r"(?:^ *<!-- (?P<mark>[^\n]*?) -->\n+)?^ *```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *```$", re.M | re.S
)
_BASE, _DRAFT = ROOT / "demo" / "base", ROOT / "demo" / "draft"
_STANDINS = {"owner/name": _BASE, "owner/model": _BASE, "owner/small": _DRAFT}
"""Models of the demo family that stand in for models of the hub."""


def pages() -> list[Path]:
    """Everything that readers may copy from."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "demo/README.md")]
    inside = sorted((ROOT / "docs").rglob("*.md"))
    return top + [path for path in inside if path.parent.name not in ("log", "decisions")]


def needs_demo(page: Path) -> bool:
    """Whether its blocks run against the demo's model, which is downloaded."""
    return page.read_text(encoding="utf-8").startswith(DEMO_PAGE)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    text: str
    mark: str = ""
    """The comment before it."""

    @property
    def reason(self) -> str:
        """Why it is not run; "" if it is."""
        return self.mark.removeprefix(BEFORE) if self.mark.startswith(BEFORE) else ""

    @property
    def file(self) -> str:
        """The file that it becomes; "" if none."""
        return self.mark.removeprefix(INSIDE) if self.mark.startswith(INSIDE) else ""

    @property
    def is_output(self) -> bool:
        """Whether it is what the block before it prints."""
        return self.mark == OUTPUT

    @property
    def is_run(self) -> bool:
        return self.language in ("sh", "python") and not self.reason


def blocks(page: Path) -> list[Block]:
    """Code blocks of one page, in order."""
    found = []
    for match in _FENCE.finditer(page.read_text(encoding="utf-8")):
        mark = match["mark"] or ""
        is_ours = mark.startswith((BEFORE, INSIDE)) or mark == OUTPUT
        found.append(Block(match["language"], match["text"], mark if is_ours else ""))
    return found


class Sandbox:
    """The folder of one page: `adapters` and `model` are there, and servers that a block starts end with the page."""

    def __init__(self, folder: Path, port: int, **environment: str) -> None:
        """`port` is that of a running demo server. `environment`: further variables of the commands."""
        self._folder = folder
        self._port = port
        self._shard_port = free_port()
        self._pids = folder / "pids"
        tools = folder / "bin"
        tools.mkdir()
        serve = f'exec {sys.executable} -m tests.docs.launching "$@"'
        other = f'exec {sys.executable} -m lorikeet.launcher.cli.commands "$@"'
        scripts = {
            "lorikeet-launcher": serve,
            "lorikeet": f'if [ "$1" = serve ]; then shift; {serve}; fi\n{other}',
            "python": f'exec {sys.executable} "$@"',
        }
        for name, text in scripts.items():
            (tools / name).write_text(f"#!/bin/sh\n{text}\n")
            (tools / name).chmod(0o755)
        (folder / "adapters").mkdir()
        (folder / "adapters" / "support").symlink_to(ROOT / "demo" / "adapters" / "sql")
        (folder / "model").symlink_to(ROOT / "demo" / "base")
        kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
        path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = kept | {
            "PATH": path, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
            "SNIPPET_PIDS": str(self._pids), "SNIPPET_LOG": str(folder / "log"), "MODEL_ID": "lorikeet/base",
        } | environment  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for line in self._pids.read_text().split() if self._pids.exists() else ():
            try:
                os.killpg(int(line), signal.SIGKILL)
            except ProcessLookupError:
                pass

    def run(self, block: Block) -> str:
        """Execute a block, or make its file; returns what it printed. Raises AssertionError with it."""
        if block.file:
            (self._folder / block.file).write_text(block.text)
            return ""
        if block.language == "sh" and _starts_a_server(block.text):
            self._port = free_port()
        text = re.sub(r"(localhost|127\.0\.0\.1):3000", f"127.0.0.1:{self._port}", block.text)
        text = text.replace("127.0.0.1:9000", f"127.0.0.1:{self._shard_port}")
        url = f"http://127.0.0.1:{self._port}"
        environment = self._environment | {"SNIPPET_PORT": str(self._port), "LORIKEET_URL": url}
        command = ["bash", "-euo", "pipefail", "-c", text]
        if block.language == "python":
            for name, folder in _STANDINS.items():
                text = text.replace(f'"{name}"', repr(str(folder)))
            command = [sys.executable, "-c", text]
        done = subprocess.run(
            command, cwd=self._folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"exit code {done.returncode} of\n{block.text}\n{done.stdout[-4000:]}"
        assert '"error":' not in done.stdout.partition("\n")[0], f"an error of\n{block.text}\n{done.stdout[:2000]}"
        return done.stdout


def run_page(page: Path, sandbox: Sandbox) -> None:
    """Execute the blocks of a page, and compare what they print with the page."""
    printed = ""
    for block in blocks(page):
        if block.is_run or block.file:
            printed = sandbox.run(block)
        elif block.is_output:
            missing = [line for line in block.text.splitlines() if line.strip() and line.strip() not in printed]
            assert not missing, f"{page.relative_to(ROOT)} shows {missing}; printed was\n{printed}"


def _starts_a_server(text: str) -> bool:
    commands = [line for line in text.splitlines() if re.search("lorikeet-launcher|lorikeet serve", line)]
    return any(not set(re.findall(r"(?<!\S)--?[a-z-]+", line)) & set(ENDING) for line in commands)


def standin(word: str) -> str:
    """A word of a launcher's command line, with the demo family instead of models of the hub."""
    return str(_STANDINS.get(word, word))
