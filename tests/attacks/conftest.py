"""A server with API keys that several files of tests share, and the table that `make attacks` prints at its end."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lorikeet.adapters.keys import sha256
from tests.attacks.attackers import CLOSED, KEYS
from tests.attacks.hostile_adapters import write_adapter
from tests.attacks.report import Report
from tests.e2e.launched import Launched

OWNER, ROOT_KEY = ({"authorization": f"Bearer {KEYS[name]}"} for name in ("owner", "root"))
"""Headers of the owner of CLOSED and of an administrator."""
NUM_NEW = 4
"""Adapters that nothing has loaded."""
_REPORT = Report()


@dataclass
class Keyed:
    """The server, and the folder with its files."""

    launched: Launched
    folder: Path

    @property
    def roots(self) -> Path:
        """Local adapters: `closed`, `used`, `changing`, and `new-0` on."""
        return self.folder / "roots"

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def receipts(self) -> Path:
        return self.folder / "receipts.jsonl"

    @property
    def usage(self) -> Path:
        return self.folder / "usage.jsonl"


@pytest.fixture(scope="session")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("keyed")
    for alpha, name in enumerate(("closed", "used", "changing", *(f"new-{number}" for number in range(NUM_NEW))), 1):
        write_adapter(folder / "roots" / name, str(alpha))
    (folder / "adapters.yaml").write_text(f"{CLOSED}: {{source: local, id: closed, keys: [owner]}}\n")
    admins = {name: str(name == "root").lower() for name in KEYS}
    keys = [f"- {{name: {name}, sha256: {sha256(key)}, admin: {admins[name]}}}\n" for name, key in KEYS.items()]
    (folder / "keys.yaml").write_text("".join(keys))
    (folder / "secret").write_text("admin's key")
    (folder / "secret").chmod(0o644)
    files = {"api-keys": "keys.yaml", "adapters": "adapters.yaml", "admin-key-file": "secret"}
    files |= {"adapter-store": "store", "receipts": "receipts.jsonl", "usage-log": "usage.jsonl"}
    flags = [word for name, file in files.items() for word in (f"--{name}", str(folder / file))]
    local = ("--local-adapter-root", str(folder / "roots"))
    with Launched("--cpu-memory", "256MiB", "--threads", "1", *local, *flags) as launched:
        yield Keyed(launched.wait_until_ready(), folder)


@pytest.fixture
def report() -> Report:
    return _REPORT


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if text := str(_REPORT):
        terminalreporter.section("canaries")
        terminalreporter.write_line(text)
