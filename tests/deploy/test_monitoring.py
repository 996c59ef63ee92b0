"""Dashboards and alerts name existing metrics and labels; the compose file is valid; generated files are up to date."""

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from lorikeet.launcher.config import rules
from lorikeet.launcher.config.settings import read
from lorikeet.router.error_answers import ANSWERS
from tests.docs.pages import metrics as reference

promql_parser = pytest.importorskip("promql_parser", reason="needs promql-parser from PyPI")

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
OF_PROMETHEUS = {"up": {"job", "instance"}}
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
"""Of the series that Prometheus stores."""
TARGET_LABELS = {"job", "instance"}


@cache
def known() -> dict[str, set[str]]:
    """Labels by the name of a stored series."""
    found = dict(OF_PROMETHEUS)
    for family in reference.families(with_vllm=False):
        for suffix in SUFFIXES.get(family.type, ("",)):
            name = family.name + suffix
            bucket = {"le"} if name.endswith("_bucket") else set()
            found[name] = {*reference.labels(family), *TARGET_LABELS, *bucket}
    return found


def generator() -> ModuleType:
    spec = util.spec_from_file_location("dashboards", FOLDER / "dashboards.py")
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules["dashboards"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def dashboards() -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((FOLDER / "grafana" / "dashboards").iterdir())}


def alerts() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((FOLDER / "prometheus" / "alerts.yaml").read_text())["groups"]
    rows: list[dict[str, Any]] = group["rules"]
    return rows


def expressions() -> Iterator[tuple[str, str]]:
    for name, board in dashboards().items():
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                yield f"{name}: {panel['title']}", target["expr"].replace("$__rate_interval", "5m")
    for rule in alerts():
        yield rule["alert"], rule["expr"]


def selectors(expression: str) -> list[Any]:
    """Every selector of series in PromQL."""
    nodes: list[Any] = []
    promql_parser.walk(promql_parser.parse(expression), nodes.append)
    return [node for node in nodes if isinstance(node, promql_parser.VectorSelector)]


@pytest.mark.parametrize(("where", "expression"), list(expressions()), ids=lambda text: text[:40])
def test_only_existing_metrics_and_labels_are_named(where: str, expression: str) -> None:
    found = selectors(expression)
    assert found, where
    for selector in found:
        assert selector.name in known(), f"{where} names {selector.name}, which is not exported"
        used = {matcher.name for matcher in selector.matchers.matchers}
        assert used <= known()[selector.name], f"{where}: {selector.name} has no label {used - known()[selector.name]}"
    for by in re.findall(r"by \(([^)]*)\)", expression):
        labels = set().union(*(known()[selector.name] for selector in found))
        assert {name.strip() for name in by.split(",")} <= labels, where


def test_buckets_that_are_named_exist() -> None:
    bounds = {
        (sample.name, sample.labels["le"])
        for family in reference.families()
        for sample in family.samples
        if "le" in sample.labels
    }
    named = re.findall(r'(\w+_bucket){[^}]*le="([^"]+)"', "\n".join(text for _, text in expressions()))
    assert named and set(named) <= bounds


def test_reasons_that_alerts_name_exist() -> None:
    reasons = {row.counted_as for row in ANSWERS.values()} | {"dropped"}
    named = re.findall(r'err=~?"([^"]+)"', "\n".join(rule["expr"] for rule in alerts()))
    assert named and {reason for text in named for reason in text.split("|")} <= reasons


def test_every_metric_of_ours_is_on_a_dashboard() -> None:
    text = "\n".join(expression for _, expression in expressions())
    ours = [family for family in reference.families(with_vllm=False) if family.name.startswith("lorikeet_")]
    current = [family.name for family in ours if not family.documentation.startswith("Deprecated")]
    left_out = {"lorikeet_dispatch_batch_size", "lorikeet_active_requests", "lorikeet_prefix_hits_total"}
    left_out |= {"lorikeet_shard_messages_total"}
    assert [name for name in current if name not in text] == sorted(left_out)


def test_what_is_generated_is_up_to_date(tmp_path: Path) -> None:
    generator().write(tmp_path)
    made = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert made == dashboards(), "run python deploy/monitoring/dashboards.py"
    assert set(made) == {"overview", "adapters", "speculation", "recovery"}


def test_panels_do_not_overlap() -> None:
    for board in dashboards().values():
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert not cells & taken and at["x"] + at["w"] <= 24
            taken |= cells


def test_each_dashboard_begins_with_a_row_of_single_numbers() -> None:
    for board in dashboards().values():
        first, *panels = board["panels"]
        kinds = [panel["type"] for panel in panels]
        assert first["title"] == "Now" and kinds[:7] == ["stat"] * 6 + ["row"] and "stat" not in kinds[6:]
        assert {panel["gridPos"]["y"] for panel in panels[:6]} == {1}
        assert all(len(panel["targets"]) == 1 and " by (" not in panel["targets"][0]["expr"].replace("by (le)", "")
                   for panel in panels[:6])  # fmt: skip


def test_alerts_say_what_to_do() -> None:
    for rule in alerts():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"].endswith(".")
    flags = set(re.findall(r"--([a-z-]+)", (FOLDER / "prometheus" / "alerts.yaml").read_text()))
    assert flags <= set(rules.FLAGS)


def compose() -> dict[str, Any]:
    text = (FOLDER / "compose.yaml").read_text()
    found: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+:-(\w*)\}", r"\1", text))
    return found


def test_the_compose_file_is_valid() -> None:
    compose_spec = pytest.importorskip("compose_spec", reason="needs compose-spec from PyPI")
    compose_spec.PyCompose.from_yaml(yaml.safe_dump(compose())).validate()
    with pytest.raises(Exception, match="prots"):
        compose_spec.PyCompose.from_yaml(yaml.safe_dump({"services": {"a": {"image": "b", "prots": []}}}))


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_the_compose_files_of_one_server_are_valid(name: str) -> None:
    compose_spec = pytest.importorskip("compose_spec", reason="needs compose-spec from PyPI")
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (FOLDER.parent / name).read_text())
    compose_spec.PyCompose.from_yaml(text).validate()
    server = yaml.safe_load(text)["services"]["server"]
    rules.check(read(server.get("command", ()), {}, "box"))
    assert "gpu" not in name or server["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


def test_the_services_of_the_compose_file_find_each_other() -> None:
    services = compose()["services"]
    rules.check(read(services["server"]["command"], {}, "box"))
    [scraped] = yaml.safe_load((FOLDER / "prometheus" / "prometheus.yaml").read_text())["scrape_configs"]
    [target] = scraped["static_configs"][0]["targets"]
    assert scraped["job_name"] == "lorikeet" and target.partition(":")[0] in services
    assert services["server"]["ports"] == [f"127.0.0.1:8080:{target.partition(':')[2]}"]
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service.get("volumes", ()):
            if volume.startswith("./"):
                assert (FOLDER / volume.split(":")[0]).is_dir()
    [provider] = yaml.safe_load((FOLDER / "grafana/provisioning/dashboards/lorikeet.yaml").read_text())["providers"]
    assert provider["options"]["path"] == "/dashboards"
    [source] = yaml.safe_load((FOLDER / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
