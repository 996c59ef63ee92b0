"""Configurations and files of other trainers and of old versions: served, and rejected, as PEFT does."""

import dataclasses
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.formats import configuration
from tests import tiny
from tests.adapters import making

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class World:
    """A base, a sound adapter, and the decisions of PEFT and of the reader on variants of it."""

    def __init__(self, folder: Path) -> None:
        self.base = tiny.make("llama", folder / "base")
        self.reader, self.facts = making.make_reader(self.base)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        self.sound = making.make_adapter(self.base, folder / "sound", config)
        self.model = making.load_base(self.base)

    def copy(self, folder: Path, **settings: Any) -> Path:
        shutil.copytree(self.sound, folder)
        values = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**values, **settings}))
        return folder

    def reason(self, adapter: Path) -> str:
        """Why the reader rejects it; "" if it computes what PEFT computes."""
        try:
            served = making.lay_out(self.reader, self.facts, adapter)
        except AdapterError as error:
            return str(error)
        expected = making.of_peft(self.base, adapter)
        torch.testing.assert_close(making.of_layout(self.base, served), expected, rtol=1e-4, atol=1e-4)
        return ""

    def peft_accepts(self, adapter: Path) -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                peft.PeftModel.from_pretrained(making.load_base(self.base), adapter)
            except Exception:
                return False
        return True


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("as-peft"))


def test_every_setting_of_peft_is_known() -> None:
    """Unknown settings are ignored, so one that PEFT computes with must not be unknown."""
    values = {field.name: "value" for field in dataclasses.fields(LoraConfig)}
    assert configuration.unknown({**values, "peft_type": "LORA", "note": "value", "empty": None}) == ["note"]


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(LoraConfig)])
def test_null_is_accepted_where_peft_accepts_it(field: str, world: World, tmp_path: Path) -> None:
    adapter = world.copy(tmp_path / "adapter", **{field: None})
    reason = world.reason(adapter)
    assert (reason == "") == world.peft_accepts(adapter)
    assert not reason or f"`{field}`" in reason


@pytest.mark.parametrize(
    "settings",
    [
        {"use_original_init": True},
        {"note": "made on a Tuesday", "trainer": {"name": "axolotl", "stages": [1, 2]}, "enable_lora": None},
        {"init_lora_weights": "lora_ga", "lora_ga_config": {"direction": "ArB2r"}},
        {"peft_version": "99.0.0"},
        {"note": "of an old version", "peft_version": "0.3.0.dev0"},
        {"merge_weights": False, "lora_dropout": 0.1},
    ],
    ids=str,
)
def test_settings_of_other_trainers_are_ignored(settings: dict[str, Any], world: World, tmp_path: Path) -> None:
    assert world.reason(world.copy(tmp_path / "adapter", **settings)) == ""


def with_name(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key.replace(".weight", ".default.weight"): tensor for key, tensor in tensors.items()}


def partly_with_name(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        key.replace(".weight", ".default.weight") if number % 2 else key: tensor
        for number, (key, tensor) in enumerate(tensors.items())
    }


@pytest.mark.parametrize("rename", [with_name, partly_with_name])
def test_names_that_contain_the_adapters_are_read(
    rename: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], world: World, tmp_path: Path
) -> None:
    adapter = world.copy(tmp_path / "adapter")
    save_file(rename(load_file(adapter / WEIGHTS)), adapter / WEIGHTS)
    assert world.reason(adapter) == ""


def test_a_file_of_torch_before_1_6_is_read(world: World, tmp_path: Path) -> None:
    adapter = world.copy(tmp_path / "adapter")
    tensors = load_file(adapter / WEIGHTS)
    (adapter / WEIGHTS).unlink()
    torch.save(tensors, adapter / "adapter_model.bin", _use_new_zipfile_serialization=False)
    assert world.reason(adapter) == ""


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_configurations_in_other_encodings_are_rejected(encoding: str, world: World, tmp_path: Path) -> None:
    adapter = world.copy(tmp_path / "adapter")
    (adapter / CONFIG).write_bytes((adapter / CONFIG).read_text().encode(encoding))
    assert not world.peft_accepts(adapter) and "is not JSON" in world.reason(adapter)
