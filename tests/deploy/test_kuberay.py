"""The KubeRay manifest: valid pods, and workers with enough GPUs for the launcher's shards."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from lorikeet.launcher.config import rules
from lorikeet.launcher.config.settings import Settings, read
from tests.launcher.config.test_rules import with_ray

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate from PyPI")

PATH = Path(__file__).parents[2] / "deploy" / "kuberay" / "raycluster.yaml"
MANIFESTS = {one["kind"]: one for one in yaml.safe_load_all(PATH.read_text())}
SPEC = MANIFESTS["RayCluster"]["spec"]
HEAD = SPEC["headGroupSpec"]
(WORKERS,) = SPEC["workerGroupSpecs"]


def command() -> Settings:
    """The launcher's settings, from the command after `exec`."""
    (line,) = HEAD["template"]["spec"]["containers"][0]["args"]
    words = shlex.split(line.rpartition("exec lorikeet-launcher")[2])
    return read(words, {}, "box")


@pytest.mark.parametrize("kind", ["PersistentVolumeClaim", "Service"])
def test_kubernetes_objects_are_valid(kind: str) -> None:
    kubernetes_validate.validate(MANIFESTS[kind], "1.34", strict=True)


@pytest.mark.parametrize("group", [HEAD, WORKERS], ids=["head", "workers"])
def test_pods_are_valid(group: dict[str, Any]) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": group["template"]["spec"]}
    kubernetes_validate.validate(pod, "1.34", strict=True)
    assert group["template"]["spec"]["enableServiceLinks"] is False, (
        "the Service `lorikeet` would set LORIKEET_PORT, a flag's variable"
    )


def test_the_launcher_accepts_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    with_ray(monkeypatch)
    rules.check(command())


def test_workers_have_a_gpu_for_every_shard() -> None:
    settings = command()
    gpus = WORKERS["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert settings["engine"] == "ray"
    assert WORKERS["minReplicas"] * gpus >= settings["replicas"]


def test_the_service_selects_the_router() -> None:
    assert MANIFESTS["Service"]["spec"]["selector"]["ray.io/cluster"] == MANIFESTS["RayCluster"]["metadata"]["name"]
    ports = {port["name"]: port["containerPort"] for port in HEAD["template"]["spec"]["containers"][0]["ports"]}
    assert ports[MANIFESTS["Service"]["spec"]["ports"][0]["targetPort"]] == command()["port"]


def test_the_head_has_time_to_drain() -> None:
    assert HEAD["template"]["spec"]["terminationGracePeriodSeconds"] >= command()["drain-timeout-s"] + 20


def test_models_and_adapters_are_on_the_shared_volume() -> None:
    for group in (HEAD, WORKERS):
        (container,) = group["template"]["spec"]["containers"]
        (data,) = [mount for mount in container["volumeMounts"] if mount["name"] == "data"]
        for name in ("huggingface-hub-cache", "adapter-store"):
            assert Path(command()[name]).is_relative_to(data["mountPath"])
    assert MANIFESTS["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
