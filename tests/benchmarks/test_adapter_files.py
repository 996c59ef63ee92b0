"""Adapters that the benchmarks make are PEFT's, the same every time, and each is another."""

from pathlib import Path

import pytest
from safetensors import SafetensorError

from benchmarks.adapters import plain_reading
from benchmarks.load import adapted
from benchmarks.models import adapter_files
from tests.oracles import peft_texts


def test_peft_reads_them_and_every_one_writes_its_own_text(small: adapted.AdaptedBase, tmp_path: Path) -> None:
    one, other = adapter_files.make(small.model, tmp_path, ["one", "other"], adapter_files.ALL)
    texts = [peft_texts.greedy(small.model, folder, [" abc abd"], 8)[0] for folder in (None, one, other)]
    assert len({tuple(ids) for ids in texts}) == 3


def test_the_same_names_give_the_same_bytes(small: adapted.AdaptedBase, tmp_path: Path) -> None:
    first = adapter_files.make(small.model, tmp_path / "a", ["x", "y"], rank=2)
    second = adapter_files.make(small.model, tmp_path / "b", ["x", "y"], rank=2)
    contents = [(folder / adapter_files.WEIGHTS).read_bytes() for folder in (*first, *second)]
    assert contents[:2] == contents[2:]
    assert contents[0] != contents[1]


def test_plain_reading_reads_what_is_sound_and_nothing_else(small: adapted.AdaptedBase, tmp_path: Path) -> None:
    sound, broken = adapter_files.make(small.model, tmp_path, ["sound", "broken"], rank=2)
    assert plain_reading.read_all(small.model, [sound, sound]) > 0
    (broken / adapter_files.WEIGHTS).write_bytes((sound / adapter_files.WEIGHTS).read_bytes()[:-4])
    with pytest.raises(SafetensorError):
        plain_reading.read_all(small.model, [sound, broken])
