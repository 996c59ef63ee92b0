"""Renders templates that the operator did not write, in processes with a time limit, turns and a budget.

Jinja's sandbox restricts what a template may access, but not its time and memory; a process can be killed. Templates
that were fast before share one process. All others share another one, where callers and sources take turns by the
seconds that they used, and whose priority is lowered after NORMAL_S: templates that loop delay only their own kind.
"""

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from lorikeet.proto.children import LineProcess, ProcessEnded
from lorikeet.proto.process import lower_priority, python, raise_priority
from lorikeet.proto.shares import Turns
from lorikeet.router.errors import ChatTemplateError
from lorikeet.router.text.chat_template import NO_OPTIONS, Rendered, TemplateOptions


class TemplateProcess(LineProcess):
    """One process; it renders one prompt at a time."""

    command = python("lorikeet.router.text.template_worker")
    max_line_bytes = 64 << 20
    log_name = "template_process"

    def __init__(self, normal_s: float | None = None) -> None:
        """normal_s: how long a prompt may run at normal priority; None for as long as it takes."""
        super().__init__()
        self._normal_s = normal_s
        self._has_stepped_back = False

    def first_line(self) -> bytes:
        return question_of("", {}, [], NO_OPTIONS)

    async def answer(self, question: bytes, seconds: float) -> dict[str, Any]:
        """The answer to a line of JSON, with `text` and `unread` or with `error`.

        Raises TimeoutError after `seconds`, and ProcessEnded; either way the next call starts another process.
        """
        await self.start()
        self._has_stepped_back = False
        loop = asyncio.get_running_loop()
        timer = None if self._normal_s is None else loop.call_later(self._normal_s, self._step_back)
        try:
            answer: dict[str, Any] = orjson.loads(await self.exchange(question, seconds))
        finally:
            if timer is not None:
                timer.cancel()
        if self._has_stepped_back and (self.pid is None or not raise_priority(self.pid)):
            await self.close()  # only privileged processes may raise a priority: the next prompt starts another one
        return answer

    def _step_back(self) -> None:
        """Lower the priority of the process until the prompt is rendered."""
        if self.pid is not None:
            self._has_stepped_back = True
            lower_priority(NICENESS, self.pid)

    async def start(self) -> None:
        """Start the process if it does not run. Raises RuntimeError if it does not start twice in a row."""
        try:
            await super().start()
        except ProcessEnded:
            raise RuntimeError("the process for chat templates did not start") from None


def question_of(
    template: str, special_tokens: dict[str, str], messages: list[dict[str, Any]], options: TemplateOptions
) -> bytes:
    """The line of JSON that asks for a prompt."""
    question = {"template": template, "special_tokens": special_tokens, "messages": messages, **asdict(options)}
    return json.dumps(question).encode()  # not orjson, which takes no large integers


SECONDS = 2.0
"""Time limit of one prompt."""
FAST_S = 0.25
"""Time limit in the process of fast templates; a template is fast that took less than half of it."""
NORMAL_S, NICENESS = 0.1, 9
"""In the process of the other templates a prompt runs for NORMAL_S seconds at normal priority, then with this niceness,
above the router's own."""
SLOW_S = 0.5
"""Prompts that take longer than these seconds are charged to a budget."""
BUDGET_S, BUDGET_PERIOD = 4.0, 60.0
"""Budget in seconds per caller and source, and its period in seconds."""
_MAX_FAST = 4096
_MAX_BUDGETS = 4096


@dataclass(eq=False, slots=True)
class _RenderJob:
    who: str
    question: bytes
    answer: asyncio.Future[tuple[dict[str, Any], float]]


class _Budgets:
    """Seconds used by each caller and source; what was used is forgiven evenly over a period."""

    def __init__(self) -> None:
        self._used: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Seconds used, and when that was."""

    def used(self, who: str) -> float:
        seconds, at = self._used.get(who, (0.0, 0.0))
        return max(0.0, seconds - (time.monotonic() - at) * BUDGET_S / BUDGET_PERIOD)

    def charge(self, who: str, seconds: float) -> None:
        self._used[who] = (self.used(who) + seconds, time.monotonic())
        self._used.move_to_end(who)
        if len(self._used) > _MAX_BUDGETS:
            self._used.popitem(last=False)

    def check(self, who: str) -> None:
        """Raises ChatTemplateError where the budget is used up."""
        excess = self.used(who) - BUDGET_S
        if excess >= 0:
            wait = max(1, round(excess * BUDGET_PERIOD / BUDGET_S))
            raise ChatTemplateError(
                f"slow templates of this source took {BUDGET_S:g} s of the last {BUDGET_PERIOD:g} s: "
                f"try again in {wait} s"
            )


class _RenderLane:
    """One process and the prompts that wait for it."""

    def __init__(self, seconds: float, budgets: _Budgets, process: TemplateProcess) -> None:
        self._seconds = seconds
        self._budgets = budgets
        self._process = process
        self._turns: Turns[_RenderJob] = Turns()
        self._worker: asyncio.Task[None] | None = None

    async def render(self, who: str, question: bytes) -> tuple[dict[str, Any], float]:
        """The answer and the seconds that it took. Raises TimeoutError, ProcessEnded or ChatTemplateError."""
        job = _RenderJob(who, question, asyncio.get_running_loop().create_future())
        self._turns.push(who, job, 1.0)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        try:
            return await job.answer
        finally:
            self._turns.remove(who, job)

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        await self._process.close()

    async def _work(self) -> None:
        """Not in the callers' tasks: when a caller leaves, the process need not be killed."""
        while len(self._turns):
            job = self._turns.pop()
            start = time.monotonic()
            try:
                self._budgets.check(job.who)
                await self._process.start()
                start = time.monotonic()
                answer = await self._answer(job.question)
            except Exception as error:
                if not job.answer.done():
                    job.answer.set_exception(error)
            else:
                if not job.answer.done():
                    job.answer.set_result((answer, time.monotonic() - start))
            seconds = time.monotonic() - start
            self._turns.charge(job.who, 1000 * seconds)
            if seconds > SLOW_S:
                self._budgets.charge(job.who, seconds)

    async def _answer(self, question: bytes) -> dict[str, Any]:
        """Asks once more where the process ended, which may have another cause than the template."""
        try:
            return await self._process.answer(question, self._seconds)
        except ProcessEnded:
            return await self._process.answer(question, self._seconds)


class UntrustedTemplates:
    """Renders the untrusted templates of one router."""

    def __init__(self) -> None:
        self._budgets = _Budgets()
        self._fast_lane = _RenderLane(FAST_S, self._budgets, TemplateProcess())
        self._other_lane = _RenderLane(SECONDS, self._budgets, TemplateProcess(NORMAL_S))
        self._fast: OrderedDict[bytes, None] = OrderedDict()
        """Hashes of templates."""

    async def render(
        self,
        template: str,
        named_tokens: dict[str, str],
        messages: list[dict[str, Any]],
        options: TemplateOptions,
        who: str,
    ) -> Rendered:
        """The prompt. `who` is the caller and the source of the template.

        Raises ChatTemplateError, and RuntimeError if the process does not start.
        """
        key = hashlib.sha256(template.encode(errors="surrogatepass")).digest()
        question = question_of(template, named_tokens, messages, options)
        try:
            answer = await self._answer(key, who, question)
        except TimeoutError:
            raise ChatTemplateError(f"the chat template took longer than {SECONDS:g} s") from None
        except ProcessEnded:
            raise ChatTemplateError("the chat template needs too much memory") from None
        if "error" in answer:
            raise ChatTemplateError(str(answer["error"])[:1000])
        return Rendered(str(answer["text"]), tuple(answer["unread"]))

    async def close(self) -> None:
        """Kill the processes."""
        await self._fast_lane.close()
        await self._other_lane.close()

    async def _answer(self, key: bytes, who: str, question: bytes) -> dict[str, Any]:
        if key in self._fast:
            try:
                return (await self._fast_lane.render(who, question))[0]
            except TimeoutError:
                self._fast.pop(key, None)
        answer, seconds = await self._other_lane.render(who, question)
        if seconds < FAST_S / 2 and "error" not in answer:
            self._fast[key] = None
            if len(self._fast) > _MAX_FAST:
                self._fast.popitem(last=False)
        return answer
