"""Templates of untrusted authors: slow ones delay only their own kind, and a process that was killed is replaced."""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from lorikeet.router.errors import ChatTemplateError
from lorikeet.router.text import untrusted_templates
from lorikeet.router.text.chat_template import NO_OPTIONS
from lorikeet.router.text.untrusted_templates import UntrustedTemplates

pytestmark = pytest.mark.anyio

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def templates(anyio_backend: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[UntrustedTemplates]:
    monkeypatch.setattr(untrusted_templates, "SECONDS", 0.6)
    monkeypatch.setattr(untrusted_templates, "SLOW_S", 0.4)
    monkeypatch.setattr(untrusted_templates, "BUDGET_S", 1.2)
    templates = UntrustedTemplates()
    yield templates
    await templates.close()


async def render(templates: UntrustedTemplates, source: str, who: str) -> str:
    return (await templates.render(source, {}, MESSAGES, NO_OPTIONS, who)).text


def kill(lane: untrusted_templates._RenderLane) -> None:
    process = lane._process._process
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


async def test_looping_templates_delay_only_their_own_kind(templates: UntrustedTemplates) -> None:
    known = "known {{ messages[0].content }}"
    for _ in range(2):  # the second time in the process for fast templates
        assert await render(templates, known, "neighbour|own") == "known Hi"
    flood = [asyncio.create_task(render(templates, LOOP + str(index), "attacker|own")) for index in range(20)]
    await asyncio.sleep(0.1)
    start = time.monotonic()
    assert await render(templates, known, "neighbour|own") == "known Hi"
    assert time.monotonic() - start < 0.6
    assert await render(templates, "new {{ messages[0].content }}", "neighbour|other") == "new Hi"
    assert time.monotonic() - start < 4
    results = await asyncio.gather(*flood, return_exceptions=True)
    assert all(isinstance(result, ChatTemplateError) for result in results)
    assert sum("took longer" in str(result) for result in results) <= 3
    assert sum("try again in" in str(result) for result in results) >= 17
    assert time.monotonic() - start < 8


async def test_a_template_that_loops_leaves_the_cores_to_others(templates: UntrustedTemplates) -> None:
    process, own = templates._other_lane._process, os.getpriority(os.PRIO_PROCESS, 0)

    def niceness() -> int:
        return -99 if process.pid is None else os.getpriority(os.PRIO_PROCESS, process.pid)

    slow = "{% for a in range(99999) %}{% for b in range(200) %}{% endfor %}{% endfor %}slow"
    for source in (LOOP, slow):
        templates._other_lane._seconds = 0.6 if source is LOOP else 60.0
        rendering = asyncio.create_task(render(templates, source, source[:20]))
        while niceness() < min(own + untrusted_templates.NICENESS, 19):
            assert not rendering.done()
            await asyncio.sleep(0.01)
        assert isinstance((await asyncio.gather(rendering, return_exceptions=True))[0], ChatTemplateError | str)
        assert await render(templates, f"new {{{{ {len(source)} }}}}", "other") == f"new {len(source)}"
        assert niceness() == own, "the next prompt runs at normal priority"


async def test_a_template_that_becomes_slow_leaves_the_fast_ones(templates: UntrustedTemplates) -> None:
    sometimes = "{% if messages[0].content == 'slow' %}" + LOOP + "{% endif %}ok"
    for _ in range(2):
        assert await render(templates, sometimes, "a") == "ok"
    slow = [{"role": "user", "content": "slow"}]
    with pytest.raises(ChatTemplateError, match="took longer"):
        await templates.render(sometimes, {}, slow, NO_OPTIONS, "a")
    assert not templates._fast
    assert await render(templates, sometimes, "b") == "ok"


async def test_a_killed_process_is_replaced_and_the_prompt_rendered(templates: UntrustedTemplates) -> None:
    templates._other_lane._seconds = 20.0
    for _ in range(3):  # in the process for new templates, then in that for fast ones
        assert await render(templates, "{{ messages[0].content }}!", "a") == "Hi!"
        for lane in (templates._fast_lane, templates._other_lane):
            kill(lane)
    assert await render(templates, "another", "a") == "another"
    killed = asyncio.create_task(
        render(templates, "{% for i in range(99999) %}{% endfor %}{% for i in range(99999) %}{% endfor %}x", "a")
    )
    await asyncio.sleep(0.02)
    kill(templates._other_lane)
    assert await killed == "x"


ENDLESS_ROUTER = """
import asyncio
from lorikeet.router.text.untrusted_templates import TemplateProcess, question_of
from lorikeet.router.text.chat_template import NO_OPTIONS

async def main():
    process = TemplateProcess()
    await process.start()
    print(process.pid, flush=True)
    await process.answer(question_of(%r, {}, [], NO_OPTIONS), 600.0)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ends with its parent on Linux only")
def test_an_endless_template_ends_with_a_router_that_was_killed() -> None:
    program = ENDLESS_ROUTER % LOOP
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as router:
        assert router.stdout is not None
        worker = os.pidfd_open(int(router.stdout.readline()))
        time.sleep(0.2)  # it renders
        router.kill()
    try:
        assert select.select([worker], [], [], 20.0)[0]
    except AssertionError:
        signal.pidfd_send_signal(worker, signal.SIGKILL)
        raise
    finally:
        os.close(worker)


@pytest.mark.parametrize("ends", [1, 2])
async def test_a_process_that_ends_at_its_start_is_started_once_more(
    templates: UntrustedTemplates, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: int
) -> None:
    """A process may end for reasons that have nothing to do with the template."""
    program = """
count=$(cat "$0" 2>/dev/null || echo 0)
echo $((count + 1)) > "$0"
[ "$count" -ge "$1" ] || exit 7
shift
exec "$@"
"""
    words = ("/bin/sh", "-c", program, str(tmp_path / "starts"), str(ends))
    command = (*words, *untrusted_templates.TemplateProcess.command)
    monkeypatch.setattr(untrusted_templates.TemplateProcess, "command", command)
    with structlog.testing.capture_logs() as logs:
        if ends == 2:
            with pytest.raises(RuntimeError, match="did not start"):
                await render(templates, "{{ messages[0].content }}", "a")
        assert await render(templates, "{{ messages[0].content }}", "a") == "Hi"
    assert [entry["event"] for entry in logs] == ["template_process_not_started"] * ends


async def test_a_caller_that_leaves_does_not_end_the_process(templates: UntrustedTemplates) -> None:
    templates._other_lane._seconds = 20.0
    assert await render(templates, "one", "a") == "one"
    process = templates._other_lane._process._process
    left = asyncio.create_task(render(templates, "{% for i in range(99999) %}{% endfor %}two", "a"))
    await asyncio.sleep(0.01)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    assert await render(templates, "three", "a") == "three"
    assert templates._other_lane._process._process is process


@pytest.mark.parametrize("source", ["", "{{ '' }}", "{{ '\\ud800' }}", "{{ missing.attribute }}"])
async def test_prompts_that_cannot_be_tokenized_are_rejected(templates: UntrustedTemplates, source: str) -> None:
    with pytest.raises(ChatTemplateError):
        await render(templates, source, "a")
    assert await render(templates, "ok", "a") == "ok"


@pytest.mark.parametrize(
    ("source", "reason"), [("{{ 'a' * 2147483648 }}", "memory"), ("{{ 'a' * 8388609 }}", "too long")]
)
async def test_memory_and_prompts_are_limited(
    templates: UntrustedTemplates, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    monkeypatch.setattr(untrusted_templates, "SECONDS", 30.0)
    with pytest.raises(ChatTemplateError, match=reason):
        await render(templates, source, "a")
    assert await render(templates, "ok", "b") == "ok"
