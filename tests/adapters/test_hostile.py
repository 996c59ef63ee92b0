"""Broken and malicious adapters: each is rejected with the reason, without using the resources that it claims."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig

from lorikeet.adapters.errors import AdapterChanged, AdapterError, AdapterTooLarge
from lorikeet.adapters.formats import configuration, header, layout, weights
from tests import tiny
from tests.adapters import making
from tests.adapters.hostile import CASES, CONFIG, WEIGHTS


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny.make("llama", tmp_path_factory.mktemp("base"), tokenizer=True)
    return folder, *making.make_reader(folder)


@pytest.fixture(scope="module")
def sound(base: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound adapter's folder, to be copied."""
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return making.make_adapter(base[0], tmp_path_factory.mktemp("sound"), config)


@pytest.fixture
def adapter(sound: Path, tmp_path: Path) -> Path:
    for name in (WEIGHTS, CONFIG):
        (tmp_path / name).write_bytes((sound / name).read_bytes())
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_a_broken_adapter_is_rejected_with_the_reason(case: str, base: Any, adapter: Path) -> None:
    change, kind, sentence = CASES[case]
    change(adapter)
    _, reader, facts = base
    with pytest.raises(kind, match=f"(?is){sentence}") as refused:
        making.lay_out(reader, facts, adapter)
    assert 400 <= refused.value.status < 500
    assert len(str(refused.value)) < 600 and "\n" not in str(refused.value)
    assert not list(Path("/tmp").glob("must-not-exist-by-*"))


def test_a_rejected_adapter_does_not_affect_the_next(base: Any, sound: Path, tmp_path: Path) -> None:
    """The skeleton is as it was after any refusal."""
    folder, reader, facts = base
    fresh_reader, fresh = making.make_reader(folder)
    after, expected = making.lay_out(reader, facts, sound), making.lay_out(fresh_reader, fresh, sound)
    assert after.modules == expected.modules
    assert all(torch.equal(after.tensors[name], tensor) for name, tensor in expected.tensors.items())


def test_more_bytes_than_the_limit_are_refused_before_they_are_read(adapter: Path) -> None:
    with pytest.raises(AdapterTooLarge, match="1000 bytes"), weights.opened(adapter, 1000):
        pass


def test_a_file_that_changes_while_it_is_read_is_rejected(adapter: Path) -> None:
    with weights.opened(adapter, 1 << 20) as opened:
        opened.check_unchanged()
        with (adapter / WEIGHTS).open("r+b") as file:
            file.seek(-4, 2)
            file.write(b"abcd")
        with pytest.raises(AdapterChanged, match="changed"):
            opened.check_unchanged()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_header_with_changed_bytes_is_valid_or_rejected(data: Any, sound: Path) -> None:
    content = bytearray((sound / WEIGHTS).read_bytes())
    length = int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, 8 + length - 1))
        content[place] = data.draw(st.integers(0, 255))
    try:
        entries = header.parse(bytes(content), len(content), "it")
    except AdapterError:
        return
    reached = 8 + int.from_bytes(content[:8], "little")
    for info in sorted(entries.values(), key=lambda entry: entry.start):
        assert info.start == reached
        reached += info.num_bytes
    assert reached == len(content)


@settings(max_examples=300, deadline=None)
@given(head=st.binary(max_size=300), claimed=st.integers(0, 1 << 64) | st.none(), size=st.integers(0, 1 << 40))
def test_arbitrary_headers_raise_only_adapter_errors(head: bytes, claimed: int | None, size: int) -> None:
    prefix = (len(head) if claimed is None else claimed % (1 << 64)).to_bytes(8, "little")
    with pytest.raises(AdapterError):
        header.parse(prefix + head, size, "it")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = (
    "peft_type", "task_type", "r", "lora_alpha", "target_modules", "exclude_modules", "modules_to_save", "bias",
    "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora",
    "fan_in_fan_out", "init_lora_weights", "target_parameters", "lora_bias", "trainable_token_indices",
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3))
def test_arbitrary_settings_raise_only_adapter_errors(changes: dict[str, Any], base: Any, sound: Path) -> None:
    _, reader, facts = base
    values = {**json.loads((sound / CONFIG).read_text()), **changes}
    try:
        values = configuration.parse(json.dumps(values).encode())
        with weights.opened(sound, making.LIMIT) as opened:
            layout.lay_out(layout.decide(reader.read(values, opened), facts), facts)
    except AdapterError as refused:
        assert 400 <= refused.status < 500
