"""A server of two replicas that several files of tests share: each starts it no more than once in a process."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lorikeet.adapters.keys import sha256
from lorikeet.launcher.exits import Exit
from tests.e2e.collector import Collector
from tests.e2e.launched import ROOT, Launched

EXACT = ("--cpu-memory", "256MiB", "--threads", "1", "--dtype", "float32")
DRAFTING = ("--draft-model-id", str(ROOT / "demo" / "draft"), "--speculative-tokens", "4")
KEYS = {"alone": True, "other": True, "sharing": False}
"""API keys, and whether each is isolated. The key is `secret` and its name."""


@dataclass
class Replicas:
    """The demo model with its adapters and a draft model, twice, with rejection sampling by default."""

    launched: Launched
    receipts: Path
    """The operator's file of receipts."""
    usage: Path
    """The usage log."""
    collector: Collector
    """Collector of traces, which requests with a sampled `traceparent` have."""


@pytest.fixture(scope="session")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    folder = tmp_path_factory.mktemp("replicas")
    keys, receipts, usage = (folder / name for name in ("keys.yaml", "receipts.jsonl", "usage.jsonl"))
    lines = (
        f"- {{name: {name}, sha256: {sha256(f'secret {name}')}, isolate: {str(isolated).lower()}}}\n"
        for name, isolated in KEYS.items()
    )
    keys.write_text("".join(lines))
    files = ("--api-keys", str(keys), "--api-keys-optional", "--usage-log", str(usage), "--receipts", str(receipts))
    verification = ("--speculative-verification", "rejection", "--trust-request-chat-template")
    with Collector() as collector:
        traces = ("--otlp-endpoint", collector.url, "--otlp-sample-ratio", "0")
        with Launched(*EXACT, *DRAFTING, *verification, "--replicas", "2", *files, *traces) as launched:
            yield Replicas(launched.wait_until_ready(2), receipts, usage, collector)
            launched.signal(signal.SIGTERM)
            assert launched.wait() == Exit.OK
