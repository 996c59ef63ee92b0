"""Configuration files of processes."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lorikeet.proto.config_file import ConfigFile


@dataclass(frozen=True)
class Inner(ConfigFile):
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer(ConfigFile):
    port: int
    inner: Inner = field(default_factory=Inner)
    any: dict[str, list[int]] | None = None


def test_lists_become_tuples_and_inner_configurations_are_read(tmp_path: Path) -> None:
    path = tmp_path / "outer.json"
    path.write_text(json.dumps({"port": 1, "inner": {"names": ["a"]}, "any": {"x": [1]}}))
    assert Outer.read(path) == Outer(1, Inner(("a",)), {"x": [1]})


@pytest.mark.parametrize(
    ("values", "message"),
    [({"prot": 1}, "unknown Outer fields: prot"), ({"inner": {"a": 1, "b": 2}}, "unknown Inner fields: a, b")],
)
def test_unknown_fields_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Outer.from_dict({"port": 1} | values)
