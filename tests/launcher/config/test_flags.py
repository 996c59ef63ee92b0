"""The flag table against LoRAX's flags in lorax_flags.json."""

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from lorikeet.adapters.loader.config import LoaderConfig
from lorikeet.launcher.config.flag import LOADER, ROUTER, SHARD, Flag, FlagKind, Process
from lorikeet.launcher.config.flags import FLAGS
from lorikeet.launcher.config.settings import parser
from lorikeet.proto.config_file import ConfigFile
from lorikeet.router.config import RouterConfig
from lorikeet.shard.config import ShardConfig

LORAX: list[dict[str, Any]] = json.loads((Path(__file__).parent / "lorax_flags.json").read_text())
COMPUTED = {
    "--max-input-length": "max-total-tokens − 1",
    "--max-total-tokens": "the model's context, at most what KV memory holds",
    "--max-batch-prefill-tokens": "max-input-length + 50, without --max-total-tokens at most 4145",
}
DIFFERENT = {
    "--model-id": None,
    "--adapter-memory-fraction": None,
    "--chunked-prefill": True,
    "--prefix-caching": True,
    "--shard-uds-path": None,
    "--master-port": None,
}


@pytest.mark.parametrize("row", LORAX, ids=lambda row: row["flag"])
def test_a_flag_is_lorax_s(row: dict[str, Any]) -> None:
    flag = FLAGS[row["flag"].removeprefix("--")]
    assert not flag.new
    assert flag.environment == (row["env"] or "")
    assert flag.short == row.get("short", "").removeprefix("-")
    assert flag.repeated == row.get("repeated", False)
    assert set(row.get("choices", [])) <= set(flag.choices)
    if row["flag"] in COMPUTED:
        assert flag.default is None
        assert flag.default_text == COMPUTED[row["flag"]]
    elif row["flag"] in DIFFERENT:
        assert flag.default == DIFFERENT[row["flag"]]
        assert flag.differs
    else:
        default = tuple(row["default"]) if isinstance(row["default"], list) else row["default"]
        assert flag.default == default
    if isinstance(row["default"], bool) or row.get("takes_value"):
        assert flag.kind is (FlagKind.BOOLEAN if row.get("takes_value") else FlagKind.SWITCH)


def test_every_lorax_flag_exists_and_every_other_is_marked_new() -> None:
    names = {row["flag"].removeprefix("--") for row in LORAX}
    assert len(names) == len(LORAX) == 66
    assert {name for name, flag in FLAGS.items() if not flag.new} == names


@pytest.mark.parametrize("flag", FLAGS.values(), ids=lambda flag: flag.name)
def test_a_row_is_complete(flag: Flag) -> None:
    assert flag.meaning
    assert not flag.meaning.endswith(".")
    assert not (flag.no_effect and flag.refused)
    assert bool(flag.harmless) <= bool(flag.refused)
    if flag.default not in (None, ()):
        assert flag.value(str(flag.default)) == flag.default
    if flag.refused and flag.default not in (None, ()):
        assert flag.default in flag.harmless


@pytest.mark.parametrize(
    ("process", "config"), [(SHARD, ShardConfig), (ROUTER, RouterConfig), (LOADER, LoaderConfig)], ids=str
)
def test_a_field_that_is_a_flag_has_its_default(process: Process, config: type[ConfigFile]) -> None:
    """The processes do not import the table; without the launcher they behave as with a flag that is not given."""
    defaults = {field.name: field.default for field in fields(config)}  # type: ignore[arg-type]
    rows = [flag for flag in FLAGS.values() if process in flag.to and not flag.computed]
    assert {flag.field for flag in rows} <= defaults.keys()
    for flag in rows:
        if f"--{flag.name}" not in COMPUTED:
            assert defaults[flag.field] in (flag.default, MISSING), flag.name


def test_the_parser_has_exactly_the_flags_of_the_table() -> None:
    known = {word for action in parser()._actions for word in action.option_strings if word.startswith("--")}
    assert known == {f"--{name}" for name in FLAGS} | {"--help", "--version"}


@pytest.mark.parametrize(
    ("text", "number"),
    [("1024", 1024), ("1KiB", 1024), ("1.5 GiB", 3 * 2**29), ("2g", 2**31), ("3mb", 3_000_000), ("7B", 7)],
)
def test_bytes_are_read_with_units(text: str, number: int) -> None:
    assert FLAGS["cpu-memory"].value(text) == number


@pytest.mark.parametrize("text", ["", "GiB", "1TiBs", "nan", "inf", "1 2"])
def test_an_invalid_number_of_bytes_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        FLAGS["cpu-memory"].value(text)


@pytest.mark.parametrize(("name", "text", "value"), [
    ("speculative-verification", "coupled", "shared-noise"),
    ("speculative-verification", "google", "rejection"),
    ("speculative-verification", "deepmind", "rejection"),
    ("speculative-method", "ngram", "lookup"),
    ("dtype", "half", "float16"),
    ("dtype", "float", "float32"),
    ("draft-dtype", "bf16", "bfloat16"),
    ("dtype", "auto", None),
])  # fmt: skip
def test_synonyms_of_choices_are_accepted(name: str, text: str, value: str) -> None:
    assert FLAGS[name].value(text) == value
