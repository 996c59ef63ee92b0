"""Faults of processes and files of a server, next to a canary: requests wait and are answered, and those that cannot be
get 503 with `Retry-After`.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from tests.attacks.attackers import local
from tests.attacks.canary import MAX_SECONDS, QUICK_CANARIES, Canary, canary
from tests.attacks.conftest import NUM_NEW, OWNER, ROOT_KEY, Keyed
from tests.attacks.hostile_adapters import CONFIGURATION, WEIGHTS
from tests.attacks.report import Report

NUM_UNLOADS, NUM_READS = 12, 4
"""Of an adapter that is in use, and of one that changes all the time."""
MAX_START_S = 120.0
"""Until processes that were killed are back."""


def ask(keyed: Keyed, name: str, number: int = 0) -> httpx.Response:
    """A short request of the owner for an adapter."""
    body = {"inputs": f"def f{number}(", "parameters": local(name)}
    return httpx.post(f"{keyed.launched.url}/generate", json=body, headers=OWNER, timeout=MAX_START_S)


def administer(keyed: Keyed, route: str, **body: object) -> httpx.Response:
    url = f"{keyed.launched.url}/admin/adapters/{route}"
    return httpx.post(url, json=body, headers=ROOT_KEY, timeout=MAX_START_S)


def is_served_or_repeated(answer: httpx.Response) -> bool:
    """Whether clients get what they want, now or once they repeat the request by themselves."""
    return answer.status_code == 200 or (answer.status_code == 503 and "retry-after" in answer.headers)


@contextmanager
def next_to_a_canary(keyed: Keyed, report: Report, scenario: str, *, is_cut: bool = False) -> Iterator[Canary]:
    """The canary is filled at the end."""
    ended, seen = threading.Event(), Canary()

    def is_over(num: int) -> bool:
        return ended.is_set() and num >= QUICK_CANARIES

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(canary, keyed.launched.url, is_over, headers=OWNER, is_cut=is_cut)
        try:
            yield seen
        finally:
            ended.set()
            vars(seen).update(vars(asking.result()))
    report.add(scenario, 1, seen)
    assert not seen.failures


def test_requests_wait_for_a_router_and_a_shard_that_were_killed(keyed: Keyed, report: Report) -> None:
    """So does the router's own probe: the new router begins in recovery."""
    launched, probes = keyed.launched, list[int]()
    with next_to_a_canary(keyed, report, "router and shard killed", is_cut=True):
        before = {launched.child("router"), launched.shard(0)}
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + MAX_START_S
        while len(launched.children()) < 3 or before & set(launched.children()):
            assert time.monotonic() < end, launched.output
            time.sleep(0.05)
        while httpx.get(f"{launched.url}/ready", timeout=MAX_START_S).status_code != 200:
            assert time.monotonic() < end, launched.output
            probes.append(httpx.get(f"{launched.url}/health", timeout=MAX_START_S).status_code)
    assert set(probes) <= {200}


def test_a_store_that_was_deleted_is_made_again(keyed: Keyed, report: Report) -> None:
    assert ask(keyed, "new-0").status_code == 200
    with next_to_a_canary(keyed, report, "store deleted"):
        shutil.rmtree(keyed.store)
        answers = [ask(keyed, f"new-{number}") for number in range(1, NUM_NEW)]
    assert [answer.status_code for answer in answers] == [200] * len(answers), answers[-1].text
    assert sum("adapter_store_deleted" in line for line in keyed.launched.lines) == 1


def test_files_that_were_moved_away_are_opened_again(keyed: Keyed, report: Report) -> None:
    files = (keyed.receipts, keyed.usage)
    with next_to_a_canary(keyed, report, "logs moved away"):
        assert ask(keyed, "used").status_code == 200
        for path in files:
            path.rename(path.with_suffix(".old"))
        keyed.launched.signal(signal.SIGHUP)
        end = time.monotonic() + MAX_SECONDS
        while not all(path.exists() and path.stat().st_size for path in files):
            assert time.monotonic() < end, [path.exists() for path in files]
            time.sleep(0.05)


def test_a_folder_that_is_rewritten_while_it_is_read(keyed: Keyed, report: Report) -> None:
    folder, ended = keyed.roots / "changing", threading.Event()
    texts = [
        (folder / CONFIGURATION).read_text().replace('"lora_alpha": 3', f'"lora_alpha": {n}') for n in range(20, 40)
    ]
    weights = (folder / WEIGHTS).read_bytes()

    def rewrite() -> None:
        while not ended.is_set():
            for text in texts:
                (folder / CONFIGURATION).write_text(text)
                (folder / WEIGHTS).write_bytes(weights)
                time.sleep(0.02)

    with next_to_a_canary(keyed, report, "folder rewritten"), ThreadPoolExecutor(1) as pool:
        rewriting = pool.submit(rewrite)
        try:
            answers = [ask(keyed, "changing", number) for number in range(NUM_READS)]
        finally:
            ended.set()
        rewriting.result()
        answers.append(ask(keyed, "changing"))
    wrong = [(answer.status_code, answer.text) for answer in answers if not is_served_or_repeated(answer)]
    assert not wrong
    assert answers[-1].status_code == 200, answers[-1].text


def test_a_stored_file_that_was_damaged_is_loaded_again(keyed: Keyed, report: Report) -> None:
    expected = ask(keyed, "used").json()["generated_text"]
    with next_to_a_canary(keyed, report, "stored file damaged"):
        for number in range(3):
            (digest,) = administer(keyed, "unload", adapter_id="used", adapter_source="local").json()["unloaded"]
            (path,) = [path for path in keyed.store.rglob(f"*{digest}*") if path.stat().st_size > 10_000]
            content = bytearray(path.read_bytes())
            content[-1000:] = bytes(1000)
            path.write_bytes(content if number else content[:5000])
            answer = ask(keyed, "used")
            assert (answer.status_code, answer.json().get("generated_text")) == (200, expected), answer.text


@pytest.mark.parametrize("disk", [False, True])
def test_an_adapter_is_unloaded_while_it_is_in_use(keyed: Keyed, report: Report, disk: bool) -> None:
    ended, name = threading.Event(), f"unloaded{' from disk' * disk}"

    def use() -> list[str]:
        wrong = []
        while not ended.is_set():
            answer = ask(keyed, "used")
            wrong += [] if answer.status_code == 200 else [f"{answer.status_code} {answer.text}"]
        return wrong

    with next_to_a_canary(keyed, report, name), ThreadPoolExecutor(2) as pool:
        using = [pool.submit(use) for _ in range(2)]
        seconds = []
        try:
            for number in range(NUM_UNLOADS):
                time.sleep(0.03 * number)
                began = time.monotonic()
                answer = administer(keyed, "unload", adapter_id="used", adapter_source="local", disk=disk)
                assert answer.status_code == 200, answer.text
                seconds.append(time.monotonic() - began)
        finally:
            ended.set()
    assert [one.result() for one in using] == [[], []]
    assert max(seconds) < MAX_SECONDS, seconds
