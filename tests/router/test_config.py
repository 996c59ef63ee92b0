"""The configuration file of a router: values round-trip, and unknown fields are rejected."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from lorikeet.router.config import RouterConfig


def test_a_written_configuration_reads_back(tmp_path: Path) -> None:
    config = RouterConfig("m", "/folder", ("unix:/a", "unix:/b"), cors_allow_origin=("*",), max_queue_seconds=1.5)
    path = tmp_path / "router.json"
    path.write_text(json.dumps(asdict(config)))
    assert RouterConfig.read(path) == config


def test_unknown_fields_are_named(tmp_path: Path) -> None:
    path = tmp_path / "router.json"
    path.write_text('{"model_id": "m", "model_path": "p", "shard_addresses": [], "prot": 1}')
    with pytest.raises(ValueError, match="unknown RouterConfig fields: prot"):
        RouterConfig.read(path)
