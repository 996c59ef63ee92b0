"""Collects garbage less often, times no example of hypothesis, and gives every file of tests to one worker, the slowest
files first.
"""

import gc
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import httpx._transports.default as transports
import pytest
import structlog
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parents[1]
SLOWEST = (
    "tests/e2e/conftest.py",
    "tests/shard/test_triton_samples.py",
    "tests/e2e/test_launcher.py",
    "tests/e2e/test_faults.py",
    "tests/mutants/test_mutants.py",
    "tests/shard/learning/test_learning.py",
    "tests/shard/engine/test_activated_lora.py",
    "tests/shard/startup/test_draft_model.py",
    "tests/launcher/models/test_hub.py",
    "tests/adapters/loader/test_loader.py",
    "tests/e2e/test_adapters.py",
    "tests/shard/engine/test_speculation.py",
    "tests/shard/model/kernels/test_integer.py",
    "tests/shard/sampling/test_batch.py",
    "tests/launcher/processes/test_supervisor.py",
    "tests/router/text/test_detokenizer.py",
    "tests/shard/engine/test_heads_step.py",
    "tests/shard/attention/test_cpu.py",
    "tests/router/api/routes/test_lifecycle.py",
    "tests/router/text/test_stop.py",
    "tests/router/test_server.py",
    "tests/router/dispatch/test_recovery.py",
)
"""Files that take longest, the slowest first. The others follow in their order."""
SHARED = ("tests/e2e/conftest.py", "tests/attacks/conftest.py")
"""Each has a server that several files of tests share. One worker runs them, so that the server starts once."""

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")  # other processes may take the machine for seconds

NUM_REPORTED = 10
"""Files whose time is printed at the end."""

# each client of httpx reads the certificates of all authorities, which takes longer than most requests of a test
transports.create_ssl_context = cache(httpx.create_ssl_context)  # type: ignore[attr-defined]

# with values of variables a traceback takes a hundred times as long to write
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)

gc.disable()  # until every file is imported: imports leave little garbage


def pytest_collection_finish() -> None:
    """Full collections skip everything that was imported: it would take a third of a second each time."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """End the process that forked this worker's servers."""
    if "tests.forked" in sys.modules:
        sys.modules["tests.forked"].end()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The files that took longest, when there are several."""
    seconds = defaultdict[str, float](float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) > NUM_REPORTED:
        terminalreporter.section("slowest files")
        for file in sorted(seconds, key=lambda file: -seconds[file])[:NUM_REPORTED]:
            terminalreporter.write_line(f"{seconds[file]:7.1f} s  {file}")


@cache
def unit(file: str) -> str:
    """The unit of work that a file belongs to."""
    for shared in SHARED:
        folder = shared.removesuffix("conftest.py")
        module = shared.removesuffix(".py").replace("/", ".")
        if file.startswith(folder) and f"from {module} import" in (ROOT / file).read_text():
            return shared
    return file


def rank(file: str) -> int:
    return SLOWEST.index(file) if file in SLOWEST else len(SLOWEST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `--dist loadfile`."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class SlowestFirst(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return unit(super()._split_scope(nodeid))

        def _assign_work_unit(self, node: Any) -> None:
            self.workqueue.move_to_end(min(self.workqueue, key=rank), last=False)
            super()._assign_work_unit(node)

    return SlowestFirst(config, log) if config.getoption("dist") == "loadfile" else None
