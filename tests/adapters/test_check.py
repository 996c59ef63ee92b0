"""`lorikeet-adapters check`: one row per adapter of a catalogue, from headers and configurations only."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from lorikeet.adapters import check
from lorikeet.adapters.formats import heads as heads_files
from lorikeet.adapters.formats.heads import MedusaShape
from tests import tiny
from tests.adapters import making
from tests.adapters.medusa import small
from tests.hub_server import Repository, hub

ROOT = Path(__file__).parents[2]
WEIGHTS = "adapter_model.safetensors"


class World:
    """A base, a root with sound adapters, and a catalogue."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = tiny.make("llama", folder / "base", tokenizer=True)
        self.root = folder / "root"
        for number, targets in enumerate((["q_proj"], ["q_proj", "v_proj"], ["down_proj", "embed_tokens"])):
            config = LoraConfig(r=4 + number, target_modules=targets)
            making.make_adapter(self.base, self.root / f"sound{number}", config, seed=number)

    def copy(self, name: str, number: int = 0, **settings: Any) -> Path:
        """Another folder like one of the sound ones, with other settings."""
        folder = self.root / name
        shutil.copytree(self.root / f"sound{number}", folder)
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
        return folder

    def check(
        self, entries: dict[str, Any], capsys: pytest.CaptureFixture[str], *more: str
    ) -> tuple[int, dict[str, Any]]:
        """Exit code, and rows by alias."""
        file = self.folder / "catalogue.yaml"
        file.write_text(json.dumps(entries))
        arguments = ["check", str(file), "--model-id", str(self.base), "--local-adapter-root", str(self.root), "--json"]
        code = check.main(arguments)
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return code, {row["alias"]: row for row in rows}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("check"))


def local(name: str) -> dict[str, str]:
    return {"source": "local", "id": name}


def test_valid_adapters_are_served(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = world.check({f"alias{number}": local(f"sound{number}") for number in range(3)}, capsys)
    assert code == 0 and {row["state"] for row in rows.values()} == {"served"}
    assert [(row["rank"], row["modules"]) for row in rows.values()] == [(4, 3), (5, 6), (6, 4)]
    assert rows["alias0"]["num_bytes"] == (world.root / "sound0" / WEIGHTS).stat().st_size


def test_a_folder_is_an_adapter_or_holds_adapters(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    def names(folder: Path) -> list[str]:
        assert check.main(["check", str(folder), "--model-id", str(world.base), "--json"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert {row["state"] for row in rows} == {"served"}
        return [row["alias"] for row in rows]

    sound = world.folder / "sound"
    for number in range(2):
        shutil.copytree(world.root / f"sound{number}", sound / f"sound{number}")
    assert names(sound / "sound1") == ["sound1"]
    assert names(sound) == ["sound0", "sound1"]
    (sound / "empty").mkdir()
    assert check.main(["check", str(sound / "empty"), "--model-id", str(world.base)]) == 2
    assert "has an adapter_config.json" in capsys.readouterr().err


def test_the_base_is_the_one_that_the_adapters_name(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def copied(name: str, base: object) -> Path:
        folder = shutil.copytree(world.root / "sound0", tmp_path / "all" / name)
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": base}))
        return folder

    def said(path: Path, code: int) -> str:
        assert check.main(["check", str(path)]) == code
        return "".join(capsys.readouterr())

    assert "1 of 1 adapters would be served" in said(copied("here", str(world.base)), 0)
    assert "--model-id is needed: the adapters name the base /gone, which is not on" in said(copied("gone", "/gone"), 2)
    assert "--model-id is needed: the adapters name several bases" in said(tmp_path / "all", 2)
    assert "--model-id is needed: the adapters name no base" in said(copied("bare", None), 2)
    (tmp_path / "catalogue.yaml").write_text("{}")
    assert "--model-id is needed" in said(tmp_path / "catalogue.yaml", 2)


def test_only_broken_adapters_are_refused(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    entries = {f"ok{number}": local(f"sound{number % 3}") for number in range(30)}
    world.copy("rank", r=32)
    world.copy("kind", peft_type="XLORA")
    truncated = world.copy("truncated") / WEIGHTS
    truncated.write_bytes(truncated.read_bytes()[:-8])
    other = world.copy("other-tokenizer")
    (other / "added_tokens.json").write_text('{"<new>": 999}')
    saved = world.copy("saved")
    tensors = load_file(saved / WEIGHTS)
    broken = {name: local(name) for name in ("rank", "kind", "truncated", "other-tokenizer", "nowhere")}
    code, rows = world.check({**entries, **broken, "odd": {"id": 7}}, capsys)
    assert code == 1
    assert {alias for alias, row in rows.items() if row["state"] == "refused"} == {*broken, "odd"}
    reasons = {alias: rows[alias]["reason"] for alias in broken}
    assert "[32, 64]" in reasons["rank"] and "XLORA" in reasons["kind"] and "truncated" in reasons["truncated"]
    assert "<new>" in reasons["other-tokenizer"] and "nowhere" in reasons["nowhere"]
    assert tensors  # the sound copy was left alone


def test_what_the_loader_refuses_by_shape_is_refused_here(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    folder = making.make_adapter(world.base, world.root / "whole-head", config)
    tensors = load_file(folder / WEIGHTS)
    head = next(key for key in tensors if "lm_head" in key)
    save_file({**tensors, head: torch.cat([tensors[head], tensors[head][:3]])}, folder / WEIGHTS)
    code, rows = world.check({"head": local("whole-head")}, capsys)
    assert code == 1 and "lm_head has 323 rows, the base's 320" in rows["head"]["reason"]


def test_a_bin_file_is_not_read(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    folder = world.copy("pickled")
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
    code, rows = world.check({"pickled": local("pickled")}, capsys)
    assert code == 0 and rows["pickled"]["state"] == "unseen" and rows["pickled"]["rank"] == 4


def test_heads_are_validated_alone_and_with_a_lora(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    alone, joined, other = world.root / "heads", world.copy("joined"), world.root / "other-heads"
    names = ["heads", "joined", "other-heads", "pickled-heads"]
    heads_files.write(alone, small.heads(MedusaShape(3, 1, 64)))
    heads_files.write(joined, small.heads(MedusaShape(2, 1, 64, tiny.VOCAB)))
    heads_files.write(other, small.heads(MedusaShape(3, 1, 32)))
    (joined / "config.json").write_text('{"medusa_num_heads": 5}')
    (world.root / "pickled-heads").mkdir()
    torch.save(small.heads(MedusaShape(1, 1, 64)).tensors, world.root / "pickled-heads" / "medusa_lm_head.pt")
    code, rows = world.check({name: local(name) for name in names}, capsys)
    assert code == 1 and [rows[name]["state"] for name in names] == ["served", "served", "refused", "unseen"]
    assert [(row["heads"], row["rank"], row["modules"]) for row in rows.values()][:2] == [(3, 0, 0), (2, 4, 3)]
    assert "hidden rows of 32, the base has 64" in rows["other-heads"]["reason"]
    assert "medusa_num_heads is 5, the tensors say 2" in rows["joined"]["reason"]
    assert rows["pickled-heads"]["heads"] is None and rows["joined"]["num_bytes"] > rows["heads"]["num_bytes"]


def test_no_byte_of_weights_is_read(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """A file whose tensors are a hole in the file system is validated like any other."""
    path = world.copy("hollow") / WEIGHTS
    content = path.read_bytes()
    head = content[: 8 + int.from_bytes(content[:8], "little")]
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(content))
    code, rows = world.check({"hollow": local("hollow")}, capsys)
    assert code == 0 and rows["hollow"]["state"] == "served"


@pytest.mark.long
def test_adapters_at_the_hub_are_validated_by_their_first_bytes(world: World, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in (world.root / "sound1").iterdir()}
    file = tmp_path / "catalogue.yaml"
    file.write_text(json.dumps({name: {"id": f"acme/{name}"} for name in ("sound", "private", "broken", "missing")}))
    repositories = {
        "acme/sound": Repository(files),
        "acme/private": Repository(files, token="t"),
        "acme/broken": Repository({**files, WEIGHTS: files[WEIGHTS] + b"x"}),
    }
    command = [
        sys.executable,
        "-m",
        "lorikeet.adapters.check",
        "check",
        str(file),
        "--model-id",
        str(world.base),
        "--json",
    ]
    with hub(repositories) as server:
        environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
            environment.pop(name, None)
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        requests = [request for request in server.requests if WEIGHTS in request]
    rows = {row["alias"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 1 and rows["sound"]["state"] == "served" and rows["sound"]["modules"] == 6
    assert all(rows[name]["state"] == "refused" for name in ("private", "broken", "missing"))
    assert "beyond" in rows["broken"]["reason"] and len(requests) == 2


def test_a_table_for_people(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    file = world.folder / "catalogue.yaml"
    file.write_text(json.dumps({"good": local("sound0"), "bad": local("nowhere")}))
    code = check.main(["check", str(file), "--model-id", str(world.base), "--local-adapter-root", str(world.root)])
    lines = capsys.readouterr().out.splitlines()
    header = "ALIAS STATE RANK MODULES HEADS BYTES ADAPTER REASON"
    assert code == 1 and lines[0].split() == header.split()
    assert lines[1].split()[:4] == ["good", "served", "4", "3"] and "refused" in lines[2]
    assert lines[-1] == "1 of 2 adapters would be served"


@pytest.mark.parametrize("wrong", ["file", "model", "yaml"])
def test_errors_of_the_check_are_one_sentence(wrong: str, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    file = world.folder / "other.yaml"
    file.write_text("[" if wrong == "yaml" else "{}")
    path = world.folder / "missing.yaml" if wrong == "file" else file
    model = world.root if wrong == "model" else world.base
    assert check.main(["check", str(path), "--model-id", str(model)]) == 2
    assert capsys.readouterr().err.startswith("lorikeet-adapters: ")
