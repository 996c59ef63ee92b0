"""The committed stubs are generated from the committed .proto."""

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from lorikeet import proto

ROOT = Path(__file__).parents[2]


def _pins() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    everything = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    return {pin.split("=")[0].rstrip("<>~!"): pin for pin in everything}


def test_the_generator_is_the_lowest_grpcio_that_is_supported() -> None:
    pins = _pins()
    generator = pins["grpcio-tools"].partition("==")[2]
    assert pins["grpcio"].startswith(f"grpcio>={generator},")
    assert f"GRPC_GENERATED_VERSION = '{generator}'" in (ROOT / "proto/shard_pb2_grpc.py").read_text()


@pytest.mark.skipif(
    version("grpcio-tools") != _pins()["grpcio-tools"].partition("==")[2], reason="needs the generator of `make proto`"
)
def test_stubs_are_up_to_date(tmp_path: Path) -> None:
    flags = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-Isrc", *flags, "lorikeet/proto/shard.proto"], cwd=ROOT, check=True
    )
    made = sorted((tmp_path / "lorikeet" / "proto").iterdir())
    assert len(made) == 3
    for path in made:
        assert path.read_text() == (ROOT / "proto" / path.name).read_text(), f"{path.name}: run `make proto`"


def test_the_package_is_this_repository_s() -> None:
    assert Path(proto.__file__).resolve().parent == ROOT / "proto"
