"""The configurations that the launcher writes against the dataclasses that processes read."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lorikeet.adapters.loader.config import LoaderConfig
from lorikeet.launcher.config import rules
from lorikeet.launcher.config.flag import LOADER, ROUTER, SHARD, Flag, Process
from lorikeet.launcher.config.flags import FLAGS
from lorikeet.launcher.config.rules import UsageDestinations
from lorikeet.launcher.config.settings import read
from lorikeet.launcher.models import adapters
from lorikeet.launcher.models.devices import choose_ranks
from lorikeet.launcher.models.model import ModelFolder, embedded, with_lengths
from lorikeet.launcher.processes import serving
from lorikeet.launcher.processes.ray_engine import RayConfig
from lorikeet.launcher.processes.serving import loader_fields, router_fields, shard_fields
from lorikeet.launcher.processes.supervisor import Address
from lorikeet.router.config import RouterConfig
from lorikeet.shard.config import ShardConfig

Reader = tuple[Callable[[serving.ServerPlan], dict[str, Any]], type[Any]]


def plan(tmp_path: Path, *arguments: str) -> serving.ServerPlan:
    settings = with_lengths(read(arguments, {}, "box"), {})
    (tmp_path / "config.json").write_text("{}")
    sources = adapters.plan(settings, {"HF_HOME": str(tmp_path / "hub home"), "HF_TOKEN": "hf_own"}, tmp_path, tmp_path)
    num_ranks = choose_ranks(settings["sharded"], settings["num-shard"], "cuda:0", {"CUDA_VISIBLE_DEVICES": "0,1"})
    num_ranks = num_ranks if {"sharded", "num-shard"} & settings.origins.keys() else 1
    model, destinations = (
        ModelFolder("owner/name", tmp_path, "abc"),
        rules.usage_destinations(settings, {"REQUEST_LOGGER_URL": "http://a"}),
    )
    return serving.ServerPlan(settings, model, "cpu", tmp_path, "1.2.3", sources, None, destinations, num_ranks)


def test_a_shard_reads_what_is_written(tmp_path: Path) -> None:
    path = serving.write(tmp_path / "shard.json", serving.shard_fields(plan(tmp_path, "--cpu-memory", "1GiB")))
    read_back = ShardConfig.read(path)
    assert read_back.listen == f"unix:{tmp_path}/shard-0.sock"
    assert (read_back.cpu_memory, read_back.step_tokens, read_back.max_total_tokens) == (2**30, 4145, 4096)
    assert path.stat().st_mode & 0o777 == 0o600


def test_custom_kernels_can_be_disabled(tmp_path: Path) -> None:
    for arguments, fusions in (([], "auto"), (["--disable-custom-kernels"], "none")):
        path = serving.write(tmp_path / "shard.json", serving.shard_fields(plan(tmp_path, *arguments)))
        assert ShardConfig.read(path).fusions == fusions


def test_the_draft_model_reaches_shard_and_router(tmp_path: Path) -> None:
    launch_plan = plan(tmp_path, "--draft-dtype", "float32", "--ngram-long", "6")
    launch_plan = dataclasses.replace(launch_plan, draft=ModelFolder("owner/small", tmp_path / "small"))
    read_back = ShardConfig.read(serving.write(tmp_path / "shard.json", serving.shard_fields(launch_plan)))
    assert (read_back.draft_model, read_back.draft_model_id) == (str(tmp_path / "small"), "owner/small")
    assert (read_back.draft_dtype, read_back.ngram_long) == ("float32", 6)
    router = RouterConfig.read(serving.write(tmp_path / "router.json", serving.router_fields(launch_plan)))
    assert router.draft_model_id == "owner/small"
    assert router.speculative_tokens is None  # the default is four with a draft model, as in download.py


@pytest.mark.parametrize("arguments", [("--quantize", "fp8-kv"), ("--kv-cache-dtype", "fp8")], ids=str)
def test_both_flags_set_an_fp8_kv_cache(tmp_path: Path, arguments: tuple[str, str]) -> None:
    launch_plan = plan(tmp_path, *arguments)
    shard = ShardConfig.read(serving.write(tmp_path / "shard.json", serving.shard_fields(launch_plan)))
    assert (shard.kv_cache_dtype, shard.quantize) == ("fp8", None)


def test_speculation_flags_reach_the_router(tmp_path: Path) -> None:
    launch_plan = plan(
        tmp_path,
        "--speculative-method",
        "ngram",
        "--speculative-schedule",
        "constant",
        "--speculative-verification",
        "google",
    )
    router = RouterConfig.read(serving.write(tmp_path / "router.json", serving.router_fields(launch_plan)))
    speculation = (router.speculative_method, router.speculative_schedule, router.speculative_verification)
    assert speculation == ("lookup", "constant", "rejection")


def test_a_router_reads_what_is_written(tmp_path: Path) -> None:
    launch_plan = plan(
        tmp_path, "--cors-allow-origin", "a", "--shard-address", "127.0.0.1:50051", "--ngrok-authtoken", "x9"
    )
    path = serving.write(tmp_path / "router.json", serving.router_fields(launch_plan))
    read_back = RouterConfig.read(path)
    assert read_back.shard_addresses == ("127.0.0.1:50051",)
    assert read_back.cors_allow_origin == ("a",)
    assert read_back.effective_configuration is not None
    assert read_back.effective_configuration["flags"]["max-input-length"] == 4095
    assert "x9" not in path.read_text()
    shown = json.dumps(read_back.public_configuration)
    assert str(tmp_path) not in shown and "127.0.0.1" not in shown
    assert read_back.public_configuration is not None
    assert read_back.public_configuration["flags"]["max-input-length"] == 4095


def test_destinations_of_usage_records_reach_the_router(tmp_path: Path) -> None:
    destinations = UsageDestinations("/var/log/usage.jsonl", "http://me:secret@a.example")
    launch_plan = dataclasses.replace(plan(tmp_path, "--usage-log", "usage.jsonl", "--log-texts"), usage=destinations)
    path = serving.write(tmp_path / "router.json", serving.router_fields(launch_plan))
    router = RouterConfig.read(path)
    assert router.usage_log == "/var/log/usage.jsonl"
    assert json.loads(serving.router_secrets(launch_plan))["request_logger_url"] == "http://me:secret@a.example"
    assert "me:secret" not in path.read_text()
    assert router.log_texts
    assert "me:secret" not in repr(router) + str(serving.effective(launch_plan))


def test_a_loader_reads_what_is_written(tmp_path: Path) -> None:
    launch_plan = plan(tmp_path, "--local-adapter-root", str(tmp_path), "--max-adapter-size", "1MiB")
    loader = LoaderConfig.read(serving.write(tmp_path / "loader.json", serving.loader_fields(launch_plan)))
    router = RouterConfig.read(serving.write(tmp_path / "router.json", serving.router_fields(launch_plan)))
    assert loader.sources == router.sources
    assert loader.sources.local_roots == (str(tmp_path),)
    assert loader.sources.max_adapter_bytes == 2**20
    assert loader.socket == router.loader_address
    assert Path(loader.adapter_store).is_dir()
    assert Path(loader.adapter_store).is_relative_to(loader.sources.hidden[0])
    shard = ShardConfig.read(serving.write(tmp_path / "shard.json", serving.shard_fields(launch_plan)))
    assert shard.adapter_store == loader.adapter_store


def test_replicas_share_the_machine(tmp_path: Path) -> None:
    launch_plan = plan(tmp_path, "--replicas", "2")
    shards = [
        ShardConfig.read(serving.write(tmp_path / f"shard-{index}.json", serving.shard_fields(launch_plan, index)))
        for index in range(2)
    ]
    router = RouterConfig.read(serving.write(tmp_path / "router.json", serving.router_fields(launch_plan)))
    assert router.shard_addresses == tuple(shard.listen for shard in shards)
    assert len(set(router.shard_addresses)) == 2
    alone = ShardConfig.read(serving.write(tmp_path / "alone.json", serving.shard_fields(plan(tmp_path))))
    assert all(shard.memory_wiggle_room == alone.memory_wiggle_room / 2 for shard in shards)
    assert alone.threads is None and all(shard.threads for shard in shards)
    cuda = dataclasses.replace(launch_plan, device="cuda:1")
    assert [serving.shard_fields(cuda, index)["device"] for index in range(2)] == ["cuda:1", "cuda:2"]


def test_ranks_share_the_machine_and_a_rendezvous_port(tmp_path: Path) -> None:
    split = plan(tmp_path, "--num-shard", "2", "--replicas", "2", "--master-port", "29600")
    launch_plan = dataclasses.replace(split, num_ranks=2)
    shards = [
        ShardConfig.read(serving.write(tmp_path / f"shard-{index}.json", serving.shard_fields(launch_plan, index)))
        for index in range(2)
    ]
    assert [(shard.num_ranks, shard.master_addr, shard.master_port) for shard in shards] == [
        (2, "localhost", 29600),
        (2, "localhost", 29601),
    ]
    alone = ShardConfig.read(serving.write(tmp_path / "alone.json", serving.shard_fields(plan(tmp_path))))
    assert (alone.num_ranks, alone.master_port) == (1, 0)
    assert all(shard.memory_wiggle_room == alone.memory_wiggle_room / 4 for shard in shards)
    cuda = dataclasses.replace(launch_plan, device="cuda:1")
    assert [serving.shard_fields(cuda, index)["device"] for index in range(2)] == ["cuda:1", "cuda:3"]
    assert serving.effective(launch_plan)["num_shard"] == 2
    on_ray = dataclasses.replace(plan(tmp_path, "--engine", "ray"), device="cuda:0", num_ranks=4)
    assert RayConfig(**serving.ray_fields(on_ray, ())).bundle == {"CPU": 1, "GPU": 4}


def test_configurations_of_shards_on_ray(tmp_path: Path) -> None:
    launch_plan = dataclasses.replace(plan(tmp_path, "--engine", "ray", "--replicas", "3"), device="cuda:0")
    ray = RayConfig.read(serving.write(tmp_path / "ray.json", serving.ray_fields(launch_plan, ["HF_TOKEN"])))
    assert (ray.num_shards, ray.bundle, ray.hidden) == (3, {"CPU": 1, "GPU": 1}, ("HF_TOKEN",))
    shard = ShardConfig(listen="10.0.0.1:9000", **ray.shard)
    assert (shard.device, shard.model_id, shard.parent_pid) == ("cuda:0", "owner/name", None)
    router = RouterConfig.read(serving.write(tmp_path / "router.json", serving.router_fields(launch_plan)))
    assert router.shard_addresses == (f"file:{ray.addresses_path}",)
    assert router.shard_secret_path == ray.secret_path
    assert router.stuck_files == ()


def test_shards_on_ray_reserve_a_cpu_per_thread(tmp_path: Path) -> None:
    for arguments, num in (((), 1), (("--threads", "8"), 8)):
        ray = RayConfig(**serving.ray_fields(plan(tmp_path, "--engine", "ray", *arguments), ()))
        assert (ray.bundle, ray.shard["threads"]) == ({"CPU": num}, num)


def test_the_operator_s_token_reaches_only_the_router(tmp_path: Path) -> None:
    launch_plan = plan(tmp_path)
    assert json.loads(serving.router_secrets(launch_plan))["hub_token"] == "hf_own"
    files = (serving.router_fields(launch_plan), serving.loader_fields(launch_plan), serving.shard_fields(launch_plan))
    assert "hf_own" not in str(files) + repr(launch_plan)


def test_defaults_are_the_same_on_both_sides(tmp_path: Path) -> None:
    """A process started by hand and one started by the launcher behave alike."""
    own = {"model_id", "model_path", "model_sha", "listen", "shard_addresses", "parent_pid"}
    own |= {"effective_configuration", "public_configuration", "secrets_on_stdin"}
    own |= {"model_given", "default_total_tokens", "fits_kv_memory"}  # of a length that the launcher chooses
    own |= {
        "step_tokens",
        "served_file",
        "ready_file",
        "failure_file",
        "listen_fd",
        "replacement_file",
        "stuck_files",
        "adapter_store",
        "loader_address",
        "sources",
        "hub_token",
        "request_logger_url",
        "socket",
    }
    for written, dataclass in (
        (serving.shard_fields(plan(tmp_path)), ShardConfig),
        (serving.router_fields(plan(tmp_path)), RouterConfig),
        (serving.loader_fields(plan(tmp_path)), LoaderConfig),
    ):
        defaults = {field.name: default_of(field) for field in fields(dataclass)}
        assert set(written) <= set(defaults)
        for name in set(written) - own:
            value = tuple(written[name]) if isinstance(defaults[name], tuple) else written[name]
            assert value == defaults[name], name


def default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


READERS: dict[Process, Reader] = {ROUTER: (router_fields, RouterConfig), SHARD: (shard_fields, ShardConfig)}
READERS[LOADER] = (loader_fields, LoaderConfig)
ARRIVALS = [(flag, process) for flag in FLAGS.values() for process in READERS if process in flag.to]
COMPUTED: dict[str, tuple[str, ...]] = {
    "admin-key-file": ("admin.key",),
    "max-adapter-size": ("1MiB",),
    "kv-cache-dtype": ("fp8",),
    "quantize": ("fp8",),
    "sharded": ("true",),
    "num-shard": ("2",),
    "master-port": ("29600",),
    "compile-max-batch-size": ("64",),
    "memory-wiggle-room": ("0.5",),
    "threads": ("3",),
    "shard-address": ("127.0.0.1:50051",),
    "shard-listen": ("127.0.0.1:50051",),
    "local-adapter-root": (".",),
    "lora-modules": ("name=path",),
    "chat-template": ("{{ messages }}",),
    "compile": (),
    "eager": (),
    "disable-custom-kernels": (),
}
"""A value of each computed flag that is not the default; else a file."""


@pytest.mark.parametrize(("flag", "process"), ARRIVALS, ids=lambda row: getattr(row, "name", ""))
def test_a_flag_reaches_its_processes(flag: Flag, process: Process, tmp_path: Path) -> None:
    fields, config = READERS[process]
    if not flag.computed:
        assert flag.field in config.__dataclass_fields__
        made = plan(tmp_path)
        launch_plan = dataclasses.replace(
            made, settings=made.settings.with_values(**{flag.name.replace("-", "_"): "sentinel"})
        )
        assert fields(launch_plan)[flag.field] == "sentinel"
        return
    (tmp_path / "admin.key").write_text("secret")
    words = [f"--{flag.name}", *COMPUTED.get(flag.name, (str(tmp_path / "file"),))]
    if flag.name == "admin-key-file":
        words[1] = str(tmp_path / words[1])
    assert fields(plan(tmp_path, *words)) != fields(plan(tmp_path))


def test_flags_without_a_process_are_the_launcher_s_own() -> None:
    """A new row must name its processes, or be added here."""
    without = {name for name, flag in FLAGS.items() if not flag.to and not flag.refused and not flag.no_effect}
    assert without == {
        "model-id", "revision", "huggingface-hub-cache", "weights-cache-override", "download-only", "device",
        "replicas", "engine", "draft-model-id", "draft-revision", "draft-tokenizer-id", "shard-uds-path", "env",
        "config", "print-config", "pid-file", "allow-long-max-total-tokens", "max-loras",
    }  # fmt: skip


def test_flags_without_effect_if_a_process_is_remote() -> None:
    assert {"port", "api-keys", "local-adapter-root"} <= rules.OF_ROUTERS
    assert {"quantize", "num-shard", "threads", "eager", "ngram-min"} <= rules.OF_SHARDS
    both = {
        "max-input-length",
        "drain-timeout-s",
        "shard-address",
        "shard-listen",
        "dtype",
        "model-id",
        "adapter-disk-cache",
    }
    assert not both & (rules.OF_ROUTERS | rules.OF_SHARDS)


@pytest.mark.parametrize(
    ("host", "keys", "parts"),
    [
        ("127.0.0.1", False, ["http://127.0.0.1:3000: anyone on this machine"]),
        ("0.0.0.0", False, ["http://0.0.0.0:3000: anyone who reaches port 3000", "curl http://127.0.0.1:3000"]),
        ("::", True, ["http://[::]:3000: holders of an API key who", "-H 'authorization: Bearer KEY'"]),
    ],
)
def test_the_launcher_says_who_may_use_the_server(tmp_path: Path, host: str, keys: bool, parts: list[str]) -> None:
    (tmp_path / "keys.yaml").write_text("[]")
    launch_plan = plan(tmp_path, *(["--api-keys", str(tmp_path / "keys.yaml")] if keys else []))
    shown = serving._try_it(launch_plan, Address(host, 3000))
    assert all(part in shown for part in parts), shown
    assert f"{Address(host, 3000).url}/generate " in shown
    assert f"open {Address(host, 3000).url}/ in a browser" in shown


def test_a_chat_model_is_tried_with_a_chat(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "chat_template.jinja").write_text("x")
    launch_plan = dataclasses.replace(
        plan(tmp_path, "--model-id", str(folder)), model=ModelFolder("x/llama", folder, is_local=True)
    )
    shown = serving._try_it(launch_plan, Address("127.0.0.1", 3000))
    assert "/v1/chat/completions " in shown and '"model": "llama"' in shown
    writes_code = dataclasses.replace(launch_plan, model=embedded())
    assert "/generate " in serving._try_it(writes_code, Address("127.0.0.1", 3000))


def test_a_shard_lowers_the_length_of_requests_unless_it_was_set(tmp_path: Path) -> None:
    for arguments, fits, default in (([], True, 4096), (["--max-total-tokens", "9000"], False, None)):
        launch_plan = plan(tmp_path, *arguments)
        assert serving.shard_fields(launch_plan)["fits_kv_memory"] == fits
        assert serving.router_fields(launch_plan)["default_total_tokens"] == default


@pytest.mark.parametrize(
    ("task", "path", "field"),
    [
        ("embed", "/v1/embeddings", "input"),
        ("classify", "/classify", "input"),
        ("token-classify", "/classify", "inputs"),
    ],
)
def test_a_model_without_text_is_tried_on_its_own_route(tmp_path: Path, task: str, path: str, field: str) -> None:
    shown = serving._try_it(dataclasses.replace(plan(tmp_path), task=task), Address("127.0.0.1", 3000))
    assert f"curl http://127.0.0.1:3000{path} " in shown and f'"{field}": "Hello"' in shown
