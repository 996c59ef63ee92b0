"""Every planted fault makes its test fail by a wrong value; without a fault the same tests pass in the same copy.

`make test` plants a fixed sample; the long tests plant all.
"""

from pathlib import Path

import pytest

from tests.e2e.page.browsing import CHROMIUM
from tests.mutants.faults import FAULTS, OF_DEVICES, OF_PAGE, OF_REAL_MODELS, OF_RECOVERY
from tests.mutants.mutant import ROOT, Mutant, copy_tree, is_noticed, results
from tests.real.models import CACHE

ALL = [*FAULTS, *OF_RECOVERY, *OF_DEVICES]
SAMPLE = [FAULTS[3], OF_RECOVERY[2], OF_DEVICES[6]]


@pytest.mark.long
def test_without_a_fault_all_pass(tmp_path: Path) -> None:
    tests = sorted({mutant.test for mutant in SAMPLE})
    assert not any(results(copy_tree(tmp_path), tests))


@pytest.mark.parametrize("mutant", SAMPLE, ids=lambda mutant: mutant.name)
def test_a_fault_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    assert is_noticed(mutant, copy_tree(tmp_path)) == ""


@pytest.mark.long
@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_every_fault_is_noticed_by_a_test_that_passes_without_it(mutant: Mutant, tmp_path: Path) -> None:
    assert not any(results(copy_tree(tmp_path / "sound"), [mutant.test])), f"{mutant.test} fails without a fault"
    assert is_noticed(mutant, copy_tree(tmp_path / "planted")) == ""


@pytest.mark.long
@pytest.mark.skipif(not CHROMIUM, reason="needs Debian's package chromium")
@pytest.mark.parametrize("mutant", OF_PAGE, ids=lambda mutant: mutant.name)
def test_every_fault_of_the_page_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    pytest.importorskip("playwright")
    assert not any(results(copy_tree(tmp_path / "sound"), [mutant.test], is_long=True)), (
        f"{mutant.test} fails without a fault"
    )
    assert is_noticed(mutant, copy_tree(tmp_path / "planted")) == ""


@pytest.mark.long
@pytest.mark.skipif(not CACHE.exists(), reason="`make test-real` makes the models")
@pytest.mark.parametrize("mutant", OF_REAL_MODELS, ids=lambda mutant: mutant.name)
def test_every_fault_of_real_models_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    assert not any(results(copy_tree(tmp_path / "sound"), [mutant.test], is_long=True)), (
        f"{mutant.test} fails without a fault"
    )
    assert is_noticed(mutant, copy_tree(tmp_path / "planted")) == ""


def test_every_fault_can_be_planted() -> None:
    for mutant in [*ALL, *OF_PAGE, *OF_REAL_MODELS]:
        for path, old, _ in mutant.changes:
            assert (ROOT / path).read_text().count(old) == 1, f"{mutant.name}: {path}"


def test_the_test_of_every_fault_is_selected(request: pytest.FixtureRequest) -> None:
    """Checks the files that this run collects: every test that a fault names exists and is not `long`."""
    if request.config.option.keyword or any("::" in argument for argument in request.config.args):
        pytest.skip("this run selects some tests of a file")
    selected = {name for item in request.session.items for name in (item.nodeid, item.nodeid.partition("[")[0])}
    files = {node.partition("::")[0] for node in selected}
    wanted = {mutant.test for mutant in ALL if mutant.test.partition("::")[0] in files}
    assert not wanted - selected


def test_every_published_fault_of_speculation_is_there() -> None:
    numbers = {fault.name.split()[0] for fault in FAULTS}
    assert {f"M{number}" for number in range(1, 15)} <= numbers
