"""The embedded models on held-out data, as `python -m lorikeet.demo.evaluation` measures them: what demo/README
promises.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lorikeet.demo.smollm2 import drafts
from lorikeet.demo.smollm2.evaluation import BASE
from lorikeet.demo.training.lora import RECIPES

ROOT = Path(__file__).parents[3]
SOURCES = {".py", ".md"}


def evaluated(*words: str) -> Any:
    """The last line that an evaluation prints, which is JSON."""
    command = [sys.executable, "-m", "lorikeet.demo.evaluation", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1500:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.long
def test_the_base_compresses_and_continues_code() -> None:
    found = evaluated("base")
    assert found["model_bits_per_byte"] <= found["xz_bits_per_byte"]
    assert found["compiled"] >= 0.60 * found["continuations"]


@pytest.mark.long
@pytest.mark.parametrize("name", RECIPES)
def test_an_adapter_does_its_task_and_the_base_does_not(name: str) -> None:
    (found,) = evaluated("adapters", "--only", name)
    assert found["examples"] >= 500
    assert found["exact"] >= (0.90 if RECIPES[name].invocation else 0.95)
    assert found["base_exact"] <= 0.05
    if name not in ("question", "grounded"):  # whose answers may be short
        assert found["mean_answer_tokens"] >= 16
    if name == "citation":  # whose answers are copied from the context
        assert found["min_answer_tokens"] >= 48


@pytest.mark.long
def test_calls_have_the_right_function_and_all_arguments() -> None:
    found = evaluated("calls")
    calls = [found["one call"], found["two calls"]]
    examples = sum(row["examples"] for row in calls)
    assert examples >= 500
    assert sum(row["examples"] * row["right"] for row in calls) >= 0.95 * examples


@pytest.mark.long
def test_the_draft_model_is_small_and_agrees_with_the_base() -> None:
    found = evaluated("draft")
    assert found["overlap"] >= 0.7
    assert found["draft_parameters"] <= 0.1 * found["base_parameters"]


@pytest.mark.long
def test_heads_give_several_tokens_per_step() -> None:
    taus = {f"{row['heads']} on {row['text']}": row["tokens_per_step"] for row in evaluated("heads")}
    assert taus["base on base"] >= 1.5
    assert taus["citation on citation"] >= 2.2
    assert taus["citation-joined on citation"] >= 2.2


@pytest.mark.long
def test_the_tool_trains_heads_as_good_as_the_committed_ones() -> None:
    found = evaluated("tool")
    assert found["by_tool"]["tokens_per_step"] >= 0.95 * found["committed"]["tokens_per_step"]


def test_all_that_is_committed_is_small() -> None:
    files = [path for path in (ROOT / "demo").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    size = sum(path.lstat().st_size for path in files if path.suffix not in SOURCES)
    assert size <= 32e6
    readme = (ROOT / "demo" / "README.md").read_text()
    base = (ROOT / "demo" / "base" / "model.safetensors").stat().st_size
    assert f"| {size / 1e6:.1f} MB |" in readme and f" {base / 1e6:.1f} MB, which" in readme


def test_the_readme_has_the_stored_scores() -> None:
    readme = (ROOT / "demo" / "README.md").read_text()
    scores = json.loads((ROOT / "demo" / "smollm2" / "scores.json").read_text())
    rows = {f"| `{name}` | {row['examples']} | {row['score']} | {row['base']} |" for name, row in scores.items()}
    assert rows <= set(readme.splitlines())


def test_the_readme_has_what_drafts_gave() -> None:
    readme = (ROOT / "demo" / "README.md").read_text()
    for model, ways in json.loads(drafts.RESULTS.read_text()).items():
        assert set(ways) == set(drafts.WAYS)
        cells = [f"{row['tokens_per_step']} · {row['tokens_per_second']}" for row in ways.values()]
        assert f"| {model if model != BASE else 'the model'} | {' | '.join(cells)} |" in readme.replace("`", ""), model


def test_every_adapter_that_is_served_scores_above_the_model_without_it() -> None:
    folder = ROOT / "demo" / "smollm2"
    scores = json.loads((folder / "scores.json").read_text())
    served = yaml.safe_load((folder / "adapters.yaml").read_text())
    assert set(served) - {drafts.HEADS} == set(scores) == {path.name for path in (folder / "adapters").iterdir()}
    assert all(row["score"] > row["base"] for row in scores.values())
    configs = [json.loads(path.read_text()) for path in folder.glob("adapters/*/adapter_config.json")]
    assert all(config["r"] <= 8 for config in configs)
