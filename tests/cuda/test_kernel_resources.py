"""Kernels fit every architecture: the committed results of compiling them are complete and within limits."""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.kernel_table import RESULTS, SHARED, Resources, document, parse

ROOT = Path(__file__).parents[2]
VERSION, COMMITTED = parse(RESULTS.read_text().splitlines())


def test_no_kernel_exceeds_a_limit() -> None:
    assert [row.problem for row in COMMITTED if row.problem] == []


def test_limits_notice_what_would_not_run() -> None:
    assert "spills 10760" in Resources("Llama", "attend", 75, 64, 10760, 65536, 4, "").problem
    assert "98304 bytes of shared memory" in Resources("Gemma", "attend", 75, 64, 0, 98304, 8, "").problem
    assert "room for 1 programs" in Resources("Llama", "attend", 89, 255, 0, 57348, 4, "").problem


def test_every_variant_was_compiled_for_every_architecture_as_it_is_launched() -> None:
    """Otherwise tiles changed since: `python -m tests.cuda.compile_kernels` with that version of Triton."""
    pytest.importorskip("triton")
    from lorikeet.shard.system import gpu
    from tests.cuda.kernel_variants import VARIANTS, launches
    from tests.cuda.launches import fingerprint

    wanted = set()
    for architecture in SHARED:
        capability = architecture // 10, architecture % 10
        with gpu.assumed(capability):
            for variant in VARIANTS:
                if variant.runs_on(capability):
                    by_kernel = defaultdict[str, set[Any]](set)
                    for launch in launches(variant)[0]:
                        by_kernel[launch.kernel].add(launch)
                    wanted |= {
                        (variant.name, name, architecture, fingerprint(found)) for name, found in by_kernel.items()
                    }
    assert wanted == {(row.variant, row.kernel, row.architecture, row.launches) for row in COMMITTED}


def test_every_kernel_of_the_shard_has_a_variant() -> None:
    """A kernel is what the host launches: `kernel[grid](…)`."""
    sources = [path.read_text() for path in (ROOT / "shard").rglob("*.py")]
    defined = {name for text in sources for name in re.findall(r"@triton\.jit[^\n]*\ndef (\w+)", text)}
    launched = {name for text in sources for name in re.findall(r"^ +(\w+)\[.*\]\(", text, re.MULTILINE)}
    assert defined & launched == {row.kernel for row in COMMITTED}


def test_the_documentation_shows_them() -> None:
    assert (ROOT / "docs" / "cuda-kernels.md").read_text() == document()


@pytest.mark.long
@pytest.mark.parametrize("architecture", SHARED)
def test_kernels_compile_within_the_limits(architecture: int) -> None:
    """With the installed Triton; with the version of the committed results, what they take is the same."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.cuda.compile_kernels", "--architecture", str(architecture), "--jobs", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    version, found = parse(result.stdout.splitlines())
    assert [row.problem for row in found if row.problem] == []
    if version == VERSION:
        assert set(found) == {row for row in COMMITTED if row.architecture == architecture}
