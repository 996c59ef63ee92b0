"""Callers of a server with keys who want more than theirs: they try keys, look for the names of others, and fill
lists with names of their own. Another caller is answered meanwhile.
"""

import functools
import re
import stat
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from lorikeet.router.api.access import MAX_FAILURES
from tests.attacks.attackers import CLOSED, HUB_PORT, KEYED_ATTACKS
from tests.attacks.canary import (
    MAX_SECONDS,
    MIN_CANARIES,
    QUICK_CANARIES,
    QUICK_SECONDS,
    SECONDS,
    Attacked,
    Canary,
    next_to,
)
from tests.attacks.conftest import OWNER, ROOT_KEY, Keyed
from tests.attacks.report import Report
from tests.e2e.launched import ROOT, Launched, free_port


@pytest.fixture(scope="module")
def launched(keyed: Keyed) -> Iterator[Launched]:
    """The owner's alias is in use, so that there are numbers of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HUB_PORT, str(free_port()))
        body = {"inputs": "Hi", "parameters": {"adapter_id": CLOSED, "max_new_tokens": 4}}
        url = keyed.launched.url
        assert httpx.post(f"{url}/generate", json=body, headers=OWNER, timeout=60).status_code == 200
        assert CLOSED in httpx.get(f"{url}/metrics", headers=OWNER).text
        yield keyed.launched


def attacked(launched: Launched, name: str, seconds: float, at_least: int, peer: str = "") -> Attacked:
    """The canary is the owner."""
    return next_to(launched, name, seconds, at_least, peer=peer, headers=OWNER)


@pytest.fixture(scope="module")
def harmless(launched: Launched) -> Callable[[str], Canary]:
    """What the canary saw next to harmless clients, once for each kind."""
    return functools.cache(
        lambda peer: attacked(launched, next(iter(KEYED_ATTACKS)), SECONDS, MIN_CANARIES, peer).canary
    )


def names(launched: Launched) -> set[str]:
    """Of models and adapters, for an administrator."""
    return {line["id"] for line in httpx.get(f"{launched.url}/v1/models", headers=ROOT_KEY).json()["data"]}


@pytest.mark.long
@pytest.mark.parametrize("name", KEYED_ATTACKS)
def test_a_canary_next_to_each_attack(
    launched: Launched, name: str, harmless: Callable[[str], Canary], report: Report
) -> None:
    peers = harmless(KEYED_ATTACKS[name].peer)
    assert not report.measure(launched, name, lambda: attacked(launched, name, SECONDS, MIN_CANARIES), peers)


@pytest.mark.parametrize("name", KEYED_ATTACKS)
def test_a_canary_is_answered_next_to_a_small_attack(launched: Launched, name: str) -> None:
    before = names(launched)
    seen = attacked(launched, name, QUICK_SECONDS, QUICK_CANARIES)
    assert seen.num_attacks and not seen.wrong
    assert not seen.canary.failures, "a valid key from the address of wrong ones works"
    assert max(seen.canary.seconds) < MAX_SECONDS, seen.canary.seconds
    if name == "failed-keys":
        statuses = Counter(seen.statuses)
        while statuses.total() <= MAX_FAILURES:  # on a busy machine attackers get little time
            statuses.update(attacked(launched, name, QUICK_SECONDS, QUICK_CANARIES).statuses)
        assert statuses[401] <= MAX_FAILURES, statuses
    if name == "tried-keys":
        assert seen.statuses.keys() <= {401, 429}
    assert names(launched) == before


def test_secrets_that_others_can_read_are_warned_of(launched: Launched) -> None:
    (line,) = [line for line in launched.lines if "secret_exposed" in line]
    assert "--admin-key-file" in line


WRITES = re.compile(r"^.*/dev/urandom .*> ?([\w-]+).*$", re.MULTILINE)
COMMAND = re.compile(r"\(umask 077; [^)`]*\)")
PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if WRITES.search(path.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_documented_commands_write_secrets_for_their_owner_alone(page: Path, tmp_path: Path) -> None:
    for line in WRITES.finditer(page.read_text()):
        command = COMMAND.search(line[0])
        assert command is not None, line[0]
        subprocess.run(["sh", "-c", f"umask 022; {command[0]}"], cwd=tmp_path, check=True)
        assert stat.S_IMODE((tmp_path / line[1]).stat().st_mode) == 0o600
