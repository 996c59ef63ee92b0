"""What the launcher tells its processes against what they read."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lorikeet.adapters.loader.config import LoaderConfig
from lorikeet.launcher.config import rules
from lorikeet.launcher.config.flags import FLAGS
from lorikeet.launcher.config.settings import Settings, read
from lorikeet.launcher.models import adapters
from lorikeet.launcher.models.model import ModelFolder, with_lengths
from lorikeet.launcher.models.usage import UsagePlan
from lorikeet.launcher.processes import configs
from lorikeet.launcher.processes.ray_engine import RayConfig
from lorikeet.router.config import RouterConfig
from lorikeet.shard.config import ShardConfig


def plan(tmp_path: Path, *arguments: str) -> configs.Plan:
    settings = with_lengths(read(arguments, {}, "box"), {})
    (tmp_path / "config.json").write_text("{}")
    kept = adapters.plan(settings, {"HF_HOME": str(tmp_path / "hub home"), "HF_TOKEN": "hf_own"}, tmp_path, tmp_path)
    return configs.Plan(settings, ModelFolder("owner/name", tmp_path, "abc"), "cpu", tmp_path, "1.2.3", kept)


def test_a_shard_reads_what_is_written(tmp_path: Path) -> None:
    path = configs.write(tmp_path / "shard.json", configs.shard_fields(plan(tmp_path, "--cpu-memory", "1GiB")))
    read_back = ShardConfig.read(path)
    assert read_back.listen == f"unix:{tmp_path}/shard-0.sock"
    assert (read_back.cpu_memory, read_back.step_tokens, read_back.max_total_tokens) == (2**30, 4145, 4096)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_shard_is_told_to_leave_its_fused_kernels_out(tmp_path: Path) -> None:
    for arguments, fusions in (([], "auto"), (["--disable-custom-kernels"], "none")):
        path = configs.write(tmp_path / "shard.json", configs.shard_fields(plan(tmp_path, *arguments)))
        assert ShardConfig.read(path).fusions == fusions


def test_a_shard_is_told_of_the_draft_model(tmp_path: Path) -> None:
    given = plan(tmp_path, "--draft-dtype", "float32", "--ngram-long", "6")
    given = dataclasses.replace(given, draft=ModelFolder("owner/small", tmp_path / "small"))
    read_back = ShardConfig.read(configs.write(tmp_path / "shard.json", configs.shard_fields(given)))
    assert (read_back.draft_model, read_back.draft_model_id) == (str(tmp_path / "small"), "owner/small")
    assert (read_back.draft_dtype, read_back.ngram_long) == ("float32", 6)
    router = RouterConfig.read(configs.write(tmp_path / "router.json", configs.router_fields(given)))
    assert router.draft_model_id == "owner/small"
    assert router.speculative_tokens is None  # which is four with a draft model, as models.py has it too


@pytest.mark.parametrize("arguments", [("--quantize", "fp8-kv"), ("--kv-cache-dtype", "fp8")], ids=str)
def test_a_shard_is_told_what_to_keep_kv_in(tmp_path: Path, arguments: tuple[str, str]) -> None:
    given = plan(tmp_path, *arguments)
    shard = ShardConfig.read(configs.write(tmp_path / "shard.json", configs.shard_fields(given)))
    assert (shard.kv_cache_dtype, shard.quantize) == ("fp8", None)


def test_a_router_is_told_how_to_guess(tmp_path: Path) -> None:
    given = plan(tmp_path, "--speculative-method", "ngram", "--speculative-schedule", "constant", "--verify", "google")
    router = RouterConfig.read(configs.write(tmp_path / "router.json", configs.router_fields(given)))
    found = (router.speculative_method, router.speculative_schedule, router.speculative_verify)
    assert found == ("ngram", "constant", "google")


def test_a_router_reads_what_is_written(tmp_path: Path) -> None:
    given = plan(tmp_path, "--cors-allow-origin", "a", "--shard-address", "127.0.0.1:50051", "--ngrok-authtoken", "x9")
    path = configs.write(tmp_path / "router.json", configs.router_fields(given))
    read_back = RouterConfig.read(path)
    assert read_back.shard_addresses == ("127.0.0.1:50051",)
    assert read_back.cors_allow_origin == ("a",)
    assert read_back.effective_configuration is not None
    assert read_back.effective_configuration["flags"]["max-input-length"] == 4095
    assert "x9" not in path.read_text()


def test_a_router_is_told_whom_to_tell_of_requests(tmp_path: Path) -> None:
    told = UsagePlan("/var/log/usage.jsonl", "http://me:secret@a.example")
    given = dataclasses.replace(plan(tmp_path, "--usage-log", "usage.jsonl", "--log-texts"), usage=told)
    router = RouterConfig.read(configs.write(tmp_path / "router.json", configs.router_fields(given)))
    assert (router.usage_log, router.request_logger_url) == ("/var/log/usage.jsonl", "http://me:secret@a.example")
    assert router.log_texts
    assert "me:secret" not in repr(router) + str(configs.effective(given))


def test_a_loader_reads_what_is_written(tmp_path: Path) -> None:
    given = plan(tmp_path, "--local-adapter-root", str(tmp_path), "--max-adapter-size", "1MiB")
    loader = LoaderConfig.read(configs.write(tmp_path / "loader.json", configs.loader_fields(given)))
    router = RouterConfig.read(configs.write(tmp_path / "router.json", configs.router_fields(given)))
    assert loader.sources == router.sources
    assert loader.sources.local_roots == (str(tmp_path),)
    assert loader.sources.max_adapter_bytes == 2**20
    assert loader.socket == router.loader_address
    assert Path(loader.adapter_store).is_dir()
    assert Path(loader.adapter_store).is_relative_to(loader.sources.hidden[0])
    shard = ShardConfig.read(configs.write(tmp_path / "shard.json", configs.shard_fields(given)))
    assert shard.adapter_store == loader.adapter_store


def test_replicas_share_the_machine(tmp_path: Path) -> None:
    given = plan(tmp_path, "--replicas", "2")
    shards = [
        ShardConfig.read(configs.write(tmp_path / f"shard-{index}.json", configs.shard_fields(given, index)))
        for index in range(2)
    ]
    router = RouterConfig.read(configs.write(tmp_path / "router.json", configs.router_fields(given)))
    assert router.shard_addresses == tuple(shard.listen for shard in shards)
    assert len(set(router.shard_addresses)) == 2
    alone = ShardConfig.read(configs.write(tmp_path / "alone.json", configs.shard_fields(plan(tmp_path))))
    assert all(shard.memory_wiggle_room == alone.memory_wiggle_room / 2 for shard in shards)
    assert alone.threads is None and all(shard.threads for shard in shards)
    cuda = dataclasses.replace(given, device="cuda:1")
    assert [configs.shard_fields(cuda, index)["device"] for index in range(2)] == ["cuda:1", "cuda:2"]


def test_ranks_share_the_machine_and_meet_somewhere(tmp_path: Path) -> None:
    split = plan(tmp_path, "--num-shard", "2", "--replicas", "2", "--master-port", "29600")
    given = dataclasses.replace(split, num_ranks=2)
    shards = [
        ShardConfig.read(configs.write(tmp_path / f"shard-{index}.json", configs.shard_fields(given, index)))
        for index in range(2)
    ]
    assert [(shard.num_ranks, shard.master_addr, shard.master_port) for shard in shards] == [
        (2, "localhost", 29600),
        (2, "localhost", 29601),
    ]
    alone = ShardConfig.read(configs.write(tmp_path / "alone.json", configs.shard_fields(plan(tmp_path))))
    assert (alone.num_ranks, alone.master_port) == (1, 0)
    assert all(shard.memory_wiggle_room == alone.memory_wiggle_room / 4 for shard in shards)
    cuda = dataclasses.replace(given, device="cuda:1")
    assert [configs.shard_fields(cuda, index)["device"] for index in range(2)] == ["cuda:1", "cuda:3"]
    assert configs.effective(given)["num_shard"] == 2
    on_ray = dataclasses.replace(plan(tmp_path, "--engine", "ray"), device="cuda:0", num_ranks=4)
    assert RayConfig(**configs.ray_fields(on_ray, ())).bundle == {"CPU": 1, "GPU": 4}


def test_shards_on_ray_are_told_what_their_nodes_do_not_know(tmp_path: Path) -> None:
    given = dataclasses.replace(plan(tmp_path, "--engine", "ray", "--replicas", "3"), device="cuda:0")
    ray = RayConfig.read(configs.write(tmp_path / "ray.json", configs.ray_fields(given, ["HF_TOKEN"])))
    assert (ray.num_shards, ray.bundle, ray.hidden) == (3, {"CPU": 1, "GPU": 1}, ["HF_TOKEN"])
    shard = ShardConfig(listen="10.0.0.1:9000", **ray.shard)
    assert (shard.device, shard.model_id, shard.parent_pid) == ("cuda:0", "owner/name", None)
    router = RouterConfig.read(configs.write(tmp_path / "router.json", configs.router_fields(given)))
    assert router.shard_addresses == (f"file:{ray.addresses_path}",)
    assert router.shard_secret_path == ray.secret_path
    assert router.stuck_files == ()


def test_shards_on_ray_s_cpus_take_as_many_as_they_have_threads(tmp_path: Path) -> None:
    for arguments, num in (((), 1), (("--threads", "8"), 8)):
        ray = RayConfig(**configs.ray_fields(plan(tmp_path, "--engine", "ray", *arguments), ()))
        assert (ray.bundle, ray.shard["threads"]) == ({"CPU": num}, num)


def test_the_operator_s_token_reaches_the_router_alone(tmp_path: Path) -> None:
    given = plan(tmp_path)
    assert RouterConfig.read(configs.write(tmp_path / "r", configs.router_fields(given))).hub_token == "hf_own"
    assert "hf_own" not in str(configs.loader_fields(given)) + str(configs.shard_fields(given)) + repr(given)


def test_defaults_are_the_same_on_both_sides(tmp_path: Path) -> None:
    """A process started by hand and one started by the launcher behave alike."""
    own = {"model_id", "model_path", "model_sha", "listen", "shard_addresses", "parent_pid", "effective_configuration"}
    own |= {
        "step_tokens",
        "served_file",
        "ready_file",
        "listen_fd",
        "replacement_file",
        "stuck_files",
        "adapter_store",
        "loader_address",
        "sources",
        "hub_token",
        "socket",
    }
    for written, dataclass in (
        (configs.shard_fields(plan(tmp_path)), ShardConfig),
        (configs.router_fields(plan(tmp_path)), RouterConfig),
        (configs.loader_fields(plan(tmp_path)), LoaderConfig),
    ):
        defaults = {field.name: field.default for field in fields(dataclass)}
        assert set(written) <= set(defaults)
        for name in set(written) - own:
            assert written[name] == defaults[name], name


class Noted(dict[str, Any]):
    """Notes which values are asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)


def test_the_lists_of_what_is_the_other_side_s_matter_are_complete(tmp_path: Path) -> None:
    """What only the configurations of router and loader read is a router's; what only a shard's reads, a shard's."""
    made = plan(tmp_path)

    def read_by(*fields: Callable[[configs.Plan], dict[str, Any]]) -> set[str]:
        noted = Noted(made.settings.values)
        told = dataclasses.replace(made, settings=Settings(noted, made.settings.given))
        for each in fields:
            values = {name: value for name, value in each(told).items() if name != "effective_configuration"}
            assert values
        return {name for name in noted.names if not FLAGS[name].no_effect or FLAGS[name].no_effect_on}

    of_shards, of_routers = read_by(configs.shard_fields), read_by(configs.router_fields, configs.loader_fields)
    # What decides about lengths and processes on either side, and where adapters are found before a process starts.
    both = {"max-input-length", "drain-timeout-s", "shard-address"}
    # … and how many devices there are.
    earlier = {"admin-key-file", "local-adapter-root", "log-texts", "receipts", "usage-log"}
    assert of_routers - of_shards - both - earlier == rules.OF_ROUTERS - earlier
    devices = {"num-shard", "sharded"}
    assert of_shards - of_routers - {"shard-listen", "replicas"} == rules.OF_SHARDS - devices
