"""The loader's process over its socket: shared and concurrent fetches, priorities, errors, and robustness."""

import asyncio
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig
from safetensors import safe_open

from lorikeet.adapters.formats import heads as files
from lorikeet.adapters.formats.heads import MedusaShape
from lorikeet.adapters.loader.workers import MAX_LINE_BYTES, NICENESS, SLOW_NICENESS
from lorikeet.adapters.refs import Ref, SourceKind
from lorikeet.adapters.sources.listed import LocalSource
from tests import tiny
from tests.adapters import making
from tests.adapters.loading import ROOT, Caller, Running, loader
from tests.adapters.medusa import small
from tests.hub_server import HubServer, Repository, commit_of, hub

ENDLESS = r"([\w.]+)+!"
"""A pattern that takes forever on names of any length."""


@dataclass
class World:
    """A loader at work, its base, and where its adapters come from."""

    running: Running
    base: Path
    roots: Path
    hub: HubServer
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def pin(self, name: str) -> dict[str, str]:
        """Pin of an adapter below the local root."""
        source = LocalSource([self.roots], 1 << 40)
        return asyncio.run(source.resolve(Ref(SourceKind.LOCAL, name), None)).pin.as_dict()

    def at_hub(self, name: str, files: dict[str, bytes], **how: Any) -> dict[str, str]:
        """Pin of a repository with these files."""
        self.hub.repositories[name] = Repository(files, **how)
        return {"source": "hub", "id": name, "revision": commit_of(files)}

    def until_asked_for(self, pin: dict[str, str]) -> None:
        """A reader waits for the hub's answer."""
        while not any(f"GET /{pin['id']}/resolve/" in request for request in self.hub.requests):
            time.sleep(0.02)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("loader")
    base = tiny.make("llama", folder / "base", tokenizer=True)
    roots = folder / "roots"
    for number, rank in enumerate((8, 8, 4)):
        config = LoraConfig(r=rank, lora_alpha=6, target_modules=["q_proj", "down_proj"][: 1 + number % 2] + ["v_proj"])
        making.make_adapter(base, roots / f"a{number}", config, seed=number)
    with hub({}) as server:
        environment = {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "0"}
        environment["HF_HUB_DOWNLOAD_TIMEOUT"] = "60"  # tests hold downloads back for as long as they need
        sources = {"local_roots": [str(roots)], "hub_cache": str(folder / "cache")}
        with loader(
            folder / "run",
            base,
            environment,
            sources=sources,
            reading_cpu_s=1.5,
            opening_cpu_s=0.3,
            reading_memory=128 << 20,
            opening_memory=64 << 20,
        ) as running:
            yield World(running, base, roots, server)


@pytest.fixture
def caller(world: World) -> Iterator[Caller]:
    with world.running.caller() as caller:
        yield caller


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def changed(files: dict[str, bytes], **settings: Any) -> dict[str, bytes]:
    values = {**json.loads(files["adapter_config.json"]), **settings}
    return {**files, "adapter_config.json": json.dumps(values).encode()}


def local_copy(world: World, name: str, files: dict[str, bytes]) -> dict[str, str]:
    folder = world.roots / name
    folder.mkdir()
    for entry, data in files.items():
        (folder / entry).write_bytes(data)
    return world.pin(name)


def test_a_stored_adapter_computes_what_peft_computes(world: World, caller: Caller) -> None:
    answer = caller.call(fetch=world.pin("a0"), token=None)
    assert answer["tier"] == "source" and answer["rank"] == 8
    path = world.running.store / f"{answer['digest']}.safetensors"
    assert path.stat().st_size == answer["num_bytes"] and stat.S_IMODE(path.stat().st_mode) == 0o600
    served = making.of_layout(world.base, making.read_served(path))
    torch.testing.assert_close(served, making.of_peft(world.base, world.roots / "a0"), rtol=1e-4, atol=1e-4)
    again = caller.call(fetch=world.pin("a0"), token=None)
    assert again["tier"] == "disk" and again["digest"] == answer["digest"]


def test_a_stored_file_has_metadata(world: World, caller: Caller) -> None:
    digest = caller.call(fetch=world.pin("a1"), token=None)["digest"]
    with safe_open(world.running.store / f"{digest}.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "lorikeet-adapter-1" and metadata["digest"] == digest
    assert metadata["dtype"] == "float32" and len(metadata["base"]) == 64
    assert json.loads(metadata["modules"])["model.layers.0.self_attn.v_proj"] == {"kind": "linear", "rank": 8}


def test_heads_are_counted_alone_and_with_a_lora(world: World, caller: Caller) -> None:
    heads = small.heads(MedusaShape(3, 1, 64))
    files.write(world.roots / "heads", heads)
    files.write(world.roots / "joined", heads)
    files.join(world.roots / "joined", world.roots / "a0")
    (world.roots / "joined" / "config.json").write_text('{"medusa_num_heads": 2}')
    alone, joined = (caller.call(fetch=world.pin(name)) for name in ("heads", "joined"))
    assert [(answer["num_heads"], answer["rank"]) for answer in (alone, joined)] == [(3, 0), (3, 8)]
    assert caller.call(fetch=world.pin("a0"))["num_heads"] == 0
    assert "medusa_num_heads is 2, the tensors say 3" in world.running.log.read_text()
    with safe_open(world.running.store / f"{joined['digest']}.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["heads"]) == {"count": 3, "version": 2, "layers": 1}
        assert torch.equal(file.get_tensor("heads.2.weight"), heads.tensors["2.0.linear.weight"])
    again = caller.call(fetch=world.pin("joined"))
    assert again == {**joined, "call": again["call"], "tier": "disk"}
    for name, rank in (("heads", 0), ("joined", 8)):
        actual = caller.call(check=world.pin(name))
        assert actual["num_heads"] == 3 and actual["rank"] == rank
    merged = caller.call(merge={"pins": [world.pin("a0"), world.pin("joined")], "weights": [1, 1]})
    assert merged["error"]["status"] == 422 and "Medusa heads" in merged["error"]["message"]
    files.write(world.roots / "narrow", small.heads(MedusaShape(3, 1, 32)))
    for question in ("fetch", "check"):
        error = caller.call(**{question: world.pin("narrow")})["error"]
        assert error["status"] == 422 and "narrow cannot be served: made for another base" in error["message"]


def test_the_same_content_under_two_names_is_one_adapter(world: World, caller: Caller) -> None:
    files = content(world.roots / "a0")
    copy = local_copy(world, "copy", files)
    assert caller.call(fetch=copy)["digest"] == caller.call(fetch=world.pin("a0"))["digest"]
    other = local_copy(world, "other-scaling", changed(files, lora_alpha=7))
    assert caller.call(fetch=other)["digest"] != caller.call(fetch=copy)["digest"]


def test_concurrent_fetches_of_one_adapter_are_one_job(world: World, caller: Caller) -> None:
    opened = threading.Event()
    pin = world.at_hub("acme/once", changed(content(world.roots / "a0"), lora_alpha=11), open=opened)
    with world.running.caller() as second:
        calls = [caller.ask(fetch=pin) for _ in range(5)]
        others = [second.ask(fetch=pin) for _ in range(5)]
        caller.until(lambda stats: stats["fetching"] == 1)
        opened.set()
        digests = {caller.answer(call)["digest"] for call in calls} | {second.answer(call)["digest"] for call in others}
    assert len(digests) == 1
    name = f"/acme/once/resolve/{pin['revision']}/adapter_model.safetensors"
    assert world.hub.requests.count(f"GET {name}") == 1


def test_slow_downloads_do_not_delay_those_of_another_account(world: World, caller: Caller) -> None:
    """An account that used the loader for more than a second may hold four downloads at once: these are as many."""
    opened = threading.Event()
    files = content(world.roots / "a0")
    slow = [
        caller.ask(fetch=world.at_hub(f"slow/adapter{number}", changed(files, lora_alpha=20 + number), open=opened))
        for number in range(4)
    ]
    quick = caller.ask(fetch=world.at_hub("quick/adapter", changed(files, lora_alpha=30)))
    assert caller.answer(quick)["tier"] == "source"
    assert not set(slow) & set(caller.order)
    opened.set()
    assert all("digest" in caller.answer(call) for call in slow)


def test_a_download_stops_when_all_callers_have_cancelled(world: World, caller: Caller) -> None:
    opened = threading.Event()
    pin = world.at_hub("acme/unwanted", changed(content(world.roots / "a0"), lora_alpha=40), open=opened)
    first, second = caller.ask(fetch=pin), caller.ask(fetch=pin)
    caller.until(lambda stats: stats["fetching"] == 1)
    assert caller.call(cancel=first)["cancelled"]
    assert caller.answer(first)["error"]["status"] == 499
    assert caller.call(stats=True)["stats"]["jobs"] == 1  # the second still waits
    caller.call(cancel=second)
    caller.until(lambda stats: stats["jobs"] == 0 and stats["fetching"] == 0)
    opened.set()
    assert "digest" in caller.call(fetch=pin)


def test_a_caller_that_disconnects_leaves_no_job(world: World, caller: Caller) -> None:
    opened = threading.Event()
    pin = world.at_hub("acme/hung-up", changed(content(world.roots / "a0"), lora_alpha=41), open=opened)
    gone = world.running.caller()
    gone.ask(fetch=pin)
    caller.until(lambda stats: stats["fetching"] == 1)
    gone.close()
    caller.until(lambda stats: stats["jobs"] == 0)
    opened.set()


@pytest.mark.parametrize("how", [pytest.param("cancels", marks=pytest.mark.long), "disconnects"])
def test_who_asks_right_after_the_last_caller_left_is_served(world: World, caller: Caller, how: str) -> None:
    """The next caller joins the job or starts it anew, in whatever state it is."""
    failed = []
    for number in range(8):
        opened = threading.Event()
        files = changed(content(world.roots / "a0"), lora_alpha=200 + number + 10 * (how == "cancels"))
        pin = world.at_hub(f"acme/{how}{number}", files, open=opened)
        first = world.running.caller()
        call = first.ask(fetch=pin)
        caller.until(lambda stats: stats["fetching"] == 1)
        if number % 2:
            world.until_asked_for(pin)
        if how == "cancels":
            first.ask(cancel=call)
            second, client = first.ask(fetch=pin), first
        else:
            first.close()
            second, client = caller.ask(fetch=pin), caller
        opened.set()
        answer = client.answer(second)
        if "digest" not in answer:
            failed.append(answer)
        if client is first:
            first.close()
    assert not failed


def test_a_call_that_is_too_long_fails_alone(world: World, caller: Caller) -> None:
    opened = threading.Event()
    pin = world.at_hub("acme/next-to-long", changed(content(world.roots / "a0"), lora_alpha=230), open=opened)
    call = caller.ask(fetch=pin)
    caller.until(lambda stats: stats["fetching"] == 1)
    for size in (MAX_LINE_BYTES, 3 * MAX_LINE_BYTES):
        assert caller.raw(b'{"call": 1, "stats": "%b"}' % (b"t" * size))["error"]["status"] == 413
    opened.set()
    assert "digest" in caller.answer(call)


def test_one_callers_rights_do_not_help_another(world: World, caller: Caller) -> None:
    files = changed(content(world.roots / "a0"), lora_alpha=50)
    opened = threading.Event()
    pin = world.at_hub("acme/private", files, token="secret-of-acme", open=opened)
    refused = [caller.ask(fetch=pin, token=token) for token in ("wrong", None)]
    allowed = caller.ask(fetch=pin, token="secret-of-acme")
    opened.set()
    assert all(caller.answer(call)["error"]["status"] in (401, 403, 404) for call in refused)
    assert "digest" in caller.answer(allowed)
    assert b"secret-of-acme" not in world.running.log.read_bytes()
    kept = [path for path in world.running.store.rglob("*") if path.is_file()]
    assert not any(b"secret-of-acme" in path.read_bytes() for path in kept)


def test_missing_adapters_are_reported_by_kind_of_error(world: World, caller: Caller) -> None:
    gone = {"source": "hub", "id": "acme/gone", "revision": "0" * 40}
    assert caller.call(fetch=gone)["error"]["status"] in (401, 404)
    moved = {**world.pin("a0"), "revision": "other"}
    assert caller.call(fetch=moved)["digest"] == caller.call(fetch=world.pin("a0"))["digest"], "it is looked up again"
    outside = {"source": "local", "id": "/etc", "revision": "x"}
    assert caller.call(fetch=outside)["error"]["kind"] == "AdapterNotFound"
    unserved = {"source": "pbase", "id": "a/1", "revision": "x"}
    assert caller.call(fetch=unserved)["error"]["kind"] == "NotServed"


def test_a_rejection_names_the_adapter_and_is_cached(world: World, caller: Caller) -> None:
    files = changed(content(world.roots / "a0"), r=16)
    pin = local_copy(world, "wrong-rank", files)
    first = caller.call(fetch=pin)["error"]
    assert first["kind"] == "AdapterInvalid" and first["status"] == 422 and "wrong-rank" in first["message"]
    before = caller.call(stats=True)["stats"]["counts"]["AdapterInvalid"]
    assert caller.call(fetch=pin)["error"] == first
    assert caller.call(stats=True)["stats"]["counts"]["AdapterInvalid"] == before


@pytest.mark.long
def test_an_endless_pattern_is_stopped_without_delaying_others(world: World, caller: Caller) -> None:
    files = content(world.roots / "a0")
    endless = local_copy(world, "endless", changed(files, target_modules=ENDLESS))
    slow = caller.ask(fetch=endless)
    quick = caller.ask(fetch=local_copy(world, "next-to-endless", changed(files, lora_alpha=60)))
    assert "digest" in caller.answer(quick)
    error = caller.answer(slow)["error"]
    assert error["status"] == 422 and "pattern" in error["message"] and "endless" in error["message"]
    assert "digest" in caller.call(fetch=local_copy(world, "after-endless", changed(files, lora_alpha=61)))


@pytest.mark.long
def test_an_urgent_call_overtakes_calls_that_fill_every_slot(world: World, caller: Caller) -> None:
    files = content(world.roots / "a0")
    endless = [
        caller.ask(fetch=local_copy(world, f"filling{number}", changed(files, target_modules=ENDLESS, r=number + 1)))
        for number in range(4)
    ]
    caller.until(lambda stats: stats["converting"] == 2)
    late = caller.ask(fetch=local_copy(world, "urgent", changed(files, lora_alpha=70)))
    caller.call(urgent=late)
    assert "digest" in caller.answer(late)
    assert not set(endless) & set(caller.order)
    assert all(caller.answer(call)["error"]["status"] == 422 for call in endless)


def test_adapters_that_take_forever_delay_only_those_of_their_caller(world: World, caller: Caller) -> None:
    files = content(world.roots / "a0")
    endless = [
        caller.ask(
            fetch=local_copy(world, f"hostile{number}", changed(files, target_modules=ENDLESS, r=number + 1)),
            caller="key:bad",
        )
        for number in range(16)
    ]
    caller.until(lambda stats: stats["converting"] == 2)
    caller.answer(endless[0])
    for number in range(3):
        began = time.monotonic()
        pin = local_copy(world, f"honest{number}", changed(files, lora_alpha=240 + number))
        assert "digest" in caller.call(fetch=pin, caller="key:good")
        assert time.monotonic() - began < 2 if number else 4, "it waits for no more than what already ran"
    for call in endless:
        caller.ask(cancel=call)
    caller.until(lambda stats: stats["jobs"] == 0)
    assert len([call for call in endless if caller.answers[call]["error"]["status"] == 422]) < 8


def test_memory_is_limited_by_the_size_of_the_files(world: World, caller: Caller) -> None:
    files = content(world.roots / "a0")
    head = b'{"x":[' + b'"ab",' * (6 << 20) + b"0]}"  # strings are parsed sooner than the limit of processor time
    bomb = {**files, "adapter_model.safetensors": len(head).to_bytes(8, "little") + head}
    error = caller.call(fetch=local_copy(world, "bomb", bomb))["error"]
    assert error["status"] == 422 and "more memory than its size explains" in error["message"], error
    assert "digest" in caller.call(fetch=local_copy(world, "after-bomb", changed(files, lora_alpha=250)))


class Zeros:
    """So many bytes once it is unpickled."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return bytearray, (self.num_bytes,)


def saved(value: object, is_zip: bool) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=is_zip)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("memory", "needs more memory than its size explains"),
        ("time", "takes too much processor time"),
        ("description", "describes its tensors in more than 2097152 bytes"),
    ],
)
def test_a_bomb_ends_soon_and_delays_nobody(world: World, caller: Caller, name: str, reason: str) -> None:
    bomb = [Zeros(1 << 33)] if name == "memory" else dict.fromkeys(range(1_500_000))
    is_zip = name != "time"
    config = {"adapter_config.json": content(world.roots / "a0")["adapter_config.json"]}
    files = {**config, "adapter_model.bin": saved(bomb, is_zip)}
    bombs = [caller.ask(fetch=local_copy(world, f"{name}-bomb-{number}", files)) for number in range(4)]
    fresh = changed(content(world.roots / "a0"), lora_alpha=300 + len(name))
    assert "digest" in caller.call(fetch=local_copy(world, f"beside-{name}", fresh), caller="another")
    caller.until(lambda stats: stats["jobs"] == 0)
    for call in bombs:
        error = caller.answer(call)["error"]
        assert error["status"] == 422 and reason in error["message"], error


def test_a_damaged_file_is_loaded_again(world: World, caller: Caller) -> None:
    pin = world.pin("a1")
    digest = caller.call(fetch=pin)["digest"]
    path = world.running.store / f"{digest}.safetensors"
    sound = path.read_bytes()

    def damage() -> None:
        """Flip a sign in a new file of the same size."""
        damaged = bytearray(sound)
        damaged[-1] ^= 0x80
        path.with_suffix(".new").write_bytes(damaged)
        path.with_suffix(".new").replace(path)

    damage()
    assert caller.call(fetch=pin)["tier"] == "source", "as after a restart: what this process has not read is verified"
    assert path.read_bytes() == sound
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 0x80]))  # after it was verified
    assert not caller.call(verify=digest)["intact"]
    assert caller.call(fetch=pin)["tier"] == "source" and path.read_bytes() == sound
    assert caller.call(verify=digest)["intact"]
    damage()
    assert caller.call(fetch=local_copy(world, "same-as-a1", content(world.roots / "a1")))["digest"] == digest
    assert path.read_bytes() == sound
    assert world.running.log.read_text().count("stored_adapter_damaged") == 3


def test_a_deleted_store_is_made_again(world: World, caller: Caller) -> None:
    pins = [world.pin("a1"), world.pin("a2")]
    digests = [caller.call(fetch=pin)["digest"] for pin in pins]
    shutil.rmtree(world.running.store)
    answer = caller.call(stats=True)
    assert "stats" in answer, (answer, world.running.log.read_text()[-3000:])
    assert answer["stats"]["files"] == 0
    shutil.rmtree(world.running.store)
    for pin, digest in zip(pins, digests, strict=True):
        answer = caller.call(fetch=pin)
        assert (answer.get("digest"), answer.get("tier")) == (digest, "source"), answer
        assert caller.call(fetch=pin)["tier"] == "disk"
        assert caller.call(verify=digest)["intact"]
    assert caller.call(stats=True)["stats"]["files"] == 2
    log = world.running.log.read_text()
    assert log.count("adapter_store_deleted") == 2, "once each time"


def test_a_folder_that_was_rewritten_since_it_was_looked_up_is_looked_up_again(world: World, caller: Caller) -> None:
    files = content(world.roots / "a1")
    old = local_copy(world, "rewritten", files)
    time.sleep(0.01)
    (world.roots / "rewritten/adapter_config.json").write_bytes(changed(files, lora_alpha=77)["adapter_config.json"])
    new = world.pin("rewritten")
    assert old != new
    digest = caller.call(fetch=old).get("digest")
    assert digest is not None and digest == caller.call(fetch=new)["digest"]
    other = local_copy(world, "rewritten-too", files)
    (world.roots / "rewritten-too/README.md").write_bytes(b"words")
    merge = {"pins": [old, other], "strategy": "linear"}
    answer = caller.call(merge=merge)
    assert "digest" in answer, answer


def test_a_folder_that_is_being_written_is_read_once_it_is_complete(world: World, caller: Caller) -> None:
    files = content(world.roots / "a1")
    half = {**files, "adapter_model.safetensors": files["adapter_model.safetensors"][:1000]}
    pin = local_copy(world, "half-written", half)
    writer = threading.Timer(
        0.6, (world.roots / "half-written/adapter_model.safetensors").write_bytes, [files["adapter_model.safetensors"]]
    )
    call = caller.ask(fetch=pin)
    (world.roots / "half-written/config.new").write_bytes(b"")  # the writer goes on, so what is read may be half
    writer.start()
    answer = caller.answer(call)
    writer.join()
    assert "digest" in answer or "truncated" in answer["error"]["message"], answer
    assert "digest" in caller.call(fetch=world.pin("half-written"))


def test_a_folder_without_end_of_changes_is_tried_later(world: World, caller: Caller) -> None:
    folder = world.roots / "changing"
    pin = local_copy(world, "changing", content(world.roots / "a1"))
    ended = threading.Event()

    def write() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            (folder / "README.md").write_text(str(number))
            time.sleep(0.001)

    writer = threading.Thread(target=write)
    writer.start()
    answer = caller.call(fetch=pin)
    ended.set()
    writer.join()
    error = answer.get("error", {"status": 503, "retry_after": 1.0})  # it may be lucky
    assert (error["status"], error["retry_after"]) == (503, 1.0)
    assert "digest" in caller.call(fetch=world.pin("changing"))


def niceness(pid: int = 0) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


def test_a_running_job_is_prioritized(world: World, caller: Caller) -> None:
    opened = threading.Event()
    pin = world.at_hub("acme/prioritized", changed(content(world.roots / "a0"), lora_alpha=80), open=opened)
    call = caller.ask(fetch=pin)
    world.until_asked_for(pin)
    assert all(niceness(pid) == niceness() + NICENESS for pid in world.running.workers())
    caller.call(urgent=call)
    deadline = time.monotonic() + 30
    while not any(niceness(pid) == niceness() for pid in world.running.workers()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    opened.set()
    assert "digest" in caller.answer(call)
    caller.until(lambda stats: stats["jobs"] == 0)
    assert all(niceness(pid) == niceness() + NICENESS for pid in world.running.workers())


def test_a_job_that_takes_long_steps_back_and_its_worker_does_no_other(world: World, caller: Caller) -> None:
    files = content(world.roots / "a0")
    call = caller.ask(fetch=local_copy(world, "slow-to-read", changed(files, target_modules=ENDLESS, r=3)))
    lowest = min(19, niceness() + SLOW_NICENESS)
    deadline = time.monotonic() + 30
    while not (slow := [pid for pid in world.running.workers() if niceness(pid) == lowest]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert "digest" in caller.call(fetch=local_copy(world, "next-to-slow", changed(files, lora_alpha=62)))
    assert caller.answer(call)["error"]["status"] == 422
    assert not set(slow) & set(world.running.workers())


def test_a_killed_worker_fails_one_call(world: World, caller: Caller) -> None:
    opened = threading.Event()
    files = changed(content(world.roots / "a0"), lora_alpha=90)
    pin = world.at_hub("acme/killed", files, open=opened)
    call = caller.ask(fetch=pin)
    world.until_asked_for(pin)
    for pid in world.running.workers():
        os.kill(pid, signal.SIGKILL)
    error = caller.answer(call)["error"]
    assert error["kind"] == "LoaderFailed" and error["status"] == 503
    opened.set()
    assert "digest" in caller.call(fetch=pin)


def test_a_worker_killed_while_idle_fails_no_call(world: World, caller: Caller) -> None:
    content_of = content(world.roots / "a0")
    assert "digest" in caller.call(fetch=world.at_hub("acme/before", changed(content_of, lora_alpha=91)))
    workers = world.running.workers()
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    assert "digest" in caller.call(fetch=world.at_hub("acme/after", changed(content_of, lora_alpha=92)))


def test_invalid_calls_get_an_error(world: World, caller: Caller) -> None:
    for line in (b"nonsense", b"[]", b'{"call": "x", "stats": true}', b"[" * 100_000):
        assert caller.raw(line)["error"]["status"] == 400
    assert caller.call(dance=True)["error"]["status"] == 400
    assert caller.call(fetch={"source": "local"})["error"]["status"] == 400
    assert caller.call(fetch=7)["error"]["status"] in (400, 500)
    assert caller.call(forget="../../etc/passwd")["error"]["status"] == 400
    assert "stats" in caller.call(stats=True)


def test_a_forgotten_adapter_is_fetched_again_unless_it_is_held(world: World, caller: Caller) -> None:
    pin = world.pin("a2")
    digest = caller.call(fetch=pin)["digest"]
    assert caller.call(hold=digest)["held"]
    assert caller.call(fetch=pin)["tier"] == "disk"
    caller.call(release=digest)
    assert caller.call(forget=digest)["forgotten"]
    assert not (world.running.store / f"{digest}.safetensors").exists()
    assert caller.call(fetch=pin)["tier"] == "source"


def test_a_merge_computes_what_peft_computes(world: World, caller: Caller) -> None:
    pins = [world.pin("a0"), world.pin("a1")]
    answer = caller.call(merge={"pins": pins, "weights": [0.7, -0.4], "strategy": "linear"}, token=None)
    path = world.running.store / f"{answer['digest']}.safetensors"
    model = peft.PeftModel.from_pretrained(making.load_base(world.base), world.roots / "a0", adapter_name="a0")
    model.load_adapter(world.roots / "a1", "a1")
    model.add_weighted_adapter(["a0", "a1"], [0.7, -0.4], "both", "linear")
    model.set_adapter("both")
    served = making.of_layout(world.base, making.read_served(path))
    torch.testing.assert_close(served, making.logits(model.eval()), rtol=1e-4, atol=1e-4)
    for pin in pins:
        caller.call(fetch=pin)
    again = caller.call(merge={"pins": pins, "weights": [0.7, -0.4], "strategy": "linear"})
    assert again["tier"] == "disk" and again["digest"] == answer["digest"]


def test_each_part_of_a_merge_is_fetched_with_its_own_token(world: World, caller: Caller) -> None:
    files = content(world.roots / "a0")
    pins = [world.at_hub("m/public", files), world.at_hub("m/private", files, token="hf_mine")]
    world.hub.rejected.add("hf_other")
    merge = {"pins": pins, "weights": [0.5, 0.25]}
    assert "digest" in caller.call(merge=merge, token="hf_other", tokens=[None, "hf_mine"])
    assert caller.call(merge=merge, tokens=[None])["error"]["status"] == 400


def test_an_impossible_merge_is_rejected_with_the_reason(world: World, caller: Caller) -> None:
    pins = [world.pin("a0"), world.pin("a2")]
    error = caller.call(merge={"pins": pins, "weights": [1, 1], "strategy": "ties", "density": 0.5})["error"]
    assert error["status"] == 422 and "a0 has 8" in error["message"] and "a2 has 4" in error["message"]
    for wrong in ({"weights": [1]}, {"strategy": "svd"}, {"strategy": "ties", "density": 0}, {"strategy": "ties"}):
        assert caller.call(merge={"pins": pins, "weights": [1, 1], **wrong})["error"]["status"] == 422


def test_the_socket_is_private(world: World) -> None:
    assert stat.S_IMODE(world.running.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(world.running.store.stat().st_mode) == 0o700


@pytest.mark.long
def test_a_loader_and_its_workers_end_with_its_parent(world: World, tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from tests.adapters.loading import loader\n"
        "with loader(Path(sys.argv[1]), Path(sys.argv[2]), parent_pid=__import__('os').getpid(),"
        " sources={'local_roots': [sys.argv[3]]}) as running:\n"
        " running.caller().call(stats=True)\n"
        " print(running.process.pid, *running.processes(), flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run"), str(world.base), str(world.roots)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) >= 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.long
def test_an_unreadable_base_ends_the_loader_with_one_log_line(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    config = {"socket": "s", "model_path": str(tmp_path / "base"), "adapter_store": str(tmp_path / "store")}
    (tmp_path / "loader.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "lorikeet.adapters", str(tmp_path / "loader.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and "loader_failed" in done.stderr and "Traceback" not in done.stderr
