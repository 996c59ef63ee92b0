"""Configurations, tokenizers and indexes of adapters that hold any JSON at all: served, or refused with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig

from lorikeet.adapters import catalogue
from lorikeet.adapters.check import AdapterValidator, Headers
from lorikeet.adapters.errors import AdapterError, AdapterInvalid
from lorikeet.adapters.formats import configuration, layout
from lorikeet.adapters.formats.configuration import Tokenizers
from lorikeet.adapters.refs import Merge, Pin, SourceKind
from lorikeet.adapters.sources.base import FileHead
from lorikeet.proto.config_file import is_number, whole_number
from tests import tiny
from tests.adapters import making
from tests.adapters.hostile import CONFIG, WEIGHTS


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny.make("llama", tmp_path_factory.mktemp("base"), tokenizer=True)
    return folder, *making.make_reader(folder)


@pytest.fixture(scope="module")
def sound(base: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return making.make_adapter(base[0], tmp_path_factory.mktemp("sound"), config)


HUGE = ["1" + "0" * 400, "1e400", "-1e400", "9" * 4200, "1" + "0" * 10]


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize("field", ["lora_alpha", "r", "alpha_pattern", "rank_pattern", "layers_to_transform"])
def test_numbers_are_finite_and_in_range(field: str, number: str) -> None:
    value = f'{{"q_proj": {number}}}' if field.endswith("pattern") else number
    values = configuration.parse(f'{{"peft_type": "LORA", "{field}": {value}}}'.encode())
    with pytest.raises(AdapterInvalid, match=f"`{field}` of adapter_config.json is"):
        configuration.served(values)


@pytest.mark.parametrize("number", HUGE)
def test_numbers_of_other_files_are_in_range_too(number: str) -> None:
    listed = catalogue.parse(f"a: {{id: a/b, weight: {number}}}\nb: {{id: a/b, parameters: {{top_p: {number}}}}}")
    assert set(listed.problems) == {"a", "b"}
    pins = [Pin(SourceKind.HUB, name, "1").as_dict() for name in ("a/a", "a/b")]
    with pytest.raises(AdapterInvalid):
        Merge.from_dict({"pins": pins, "weights": [1, json.loads(number)]})
    with pytest.raises(AdapterInvalid):
        Merge.from_dict({"pins": pins, "strategy": "ties", "density": json.loads(number)})


def test_one_parser_reads_numbers() -> None:
    assert [whole_number(text, 1, 60) for text in ("1", "60", "001")] == [1, 60, 1]
    refused = ["", "0", "61", "0600", "0" * 300 + "1", "9" * 5000, "-1", "+1", " 1", "1.0", "1e1", "²", "١", "1_0"]
    assert [text for text in refused if whole_number(text, 1, 60) is not None] == []
    assert is_number(-1.5, 2) and is_number(2, 2)
    assert not any(is_number(value, 2) for value in (3, 10**400, float("inf"), float("nan"), True, "1", None))


def test_a_message_can_always_be_sent() -> None:
    error = AdapterInvalid("a name \ud800 of half a pair")
    assert str(error).encode() == b"a name ? of half a pair"


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([10**400, -(10**400), 1e300, "\ud800", "\0", "(a+)+$", "a" * 600, 1 << 63, 2.5, ""])
)  # fmt: skip
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.just("\ud800"), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = (
    "peft_type", "task_type", "r", "lora_alpha", "target_modules", "exclude_modules", "modules_to_save", "bias",
    "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora",
    "fan_in_fan_out", "init_lora_weights", "target_parameters", "lora_bias", "trainable_token_indices",
    "alora_invocation_tokens", "layer_replication", "ensure_weight_tying", "\ud800", "of_tomorrow",
)  # fmt: skip
ADDED = st.fixed_dictionaries({}, optional={"content": SCALARS, "id": SCALARS})
VOCAB = st.fixed_dictionaries({"vocab": JSON})
DECODER = st.dictionaries(st.sampled_from(["1", "x", "9" * 30]), JSON, max_size=2)
TOKENIZER = {
    "tokenizer.json": JSON
    | st.fixed_dictionaries({}, optional={"model": VOCAB | JSON, "added_tokens": st.lists(ADDED | JSON, max_size=2)}),
    "added_tokens.json": JSON | st.dictionaries(st.text(max_size=5), SCALARS, max_size=2),
    "tokenizer_config.json": JSON
    | st.fixed_dictionaries({}, optional={"pad_token": JSON, "added_tokens_decoder": DECODER | JSON}),
}


@st.composite
def hostile(draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of the configuration, and further files by name."""
    files = {name: draw(content) for name, content in TOKENIZER.items() if draw(st.booleans())}
    if draw(st.booleans()):
        files["config.json"] = draw(st.fixed_dictionaries({}, optional={"medusa_num_heads": JSON, "version": JSON}))
    return draw(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3)), files


def tried(case: Any, base: Any, sound: Path, folder: Path) -> None:
    """As the loader reads it, and as it is checked by headers: served, or an error of an adapter."""
    changes, files = case
    model, reader, facts = base
    values = {**json.loads((sound / CONFIG).read_text()), **changes}
    small = {CONFIG: json.dumps(values).encode(), **{name: json.dumps(value).encode() for name, value in files.items()}}
    for name, content in {**small, WEIGHTS: (sound / WEIGHTS).read_bytes()}.items():
        (folder / name).write_bytes(content)
    validator = AdapterValidator(reader, Tokenizers(model), facts)
    head = FileHead((sound / WEIGHTS).read_bytes(), (sound / WEIGHTS).stat().st_size)
    outcomes = []
    for read in (
        lambda: _read(folder, model, reader, facts),
        lambda: validator.validate(Headers(small, {WEIGHTS: head})),
    ):
        try:
            read()
            outcomes.append(True)
        except AdapterError as error:
            assert 400 <= error.status < 500 and len(str(error)) < 1000
            str(error).encode()
            outcomes.append(False)
    assert outcomes[1] or not outcomes[0], "what the loader serves is valid by its headers"


def _read(folder: Path, model: Path, reader: Any, facts: Any) -> None:
    with layout.open_adapter(folder, making.LIMIT) as opened:
        assert len(opened.digest) == 64
        Tokenizers(model).check(folder)
        opened.lay_out(reader, facts)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(case=hostile())
def test_hostile_configurations(case: Any, base: Any, sound: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    tried(case, base, sound, tmp_path_factory.mktemp("adapter"))


@pytest.mark.long
@settings(
    max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(case=hostile())
def test_two_thousand_hostile_configurations(
    case: Any, base: Any, sound: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tried(case, base, sound, tmp_path_factory.mktemp("adapter"))
