"""Downloads by real processes from a hub on the loopback."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lorikeet.launcher.__main__ import main
from lorikeet.launcher.exits import Exit
from lorikeet.launcher.models.hub import choose, missing_files
from lorikeet.proto.logs import readable_size
from tests.hub_server import HubServer, Repository, commit_of, hub

CONFIG = json.dumps({"model_type": "llama", "max_position_embeddings": 2048}).encode()
TWO_PARTS = json.dumps({"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}).encode()
MODEL = {
    "config.json": CONFIG,
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model-1-of-2.safetensors": b"one" * 1000,
    "model-2-of-2.safetensors": b"two" * 1000,
    "model.safetensors.index.json": TWO_PARTS,
    "pytorch_model.bin": b"old" * 1000,
    "consolidated.safetensors": b"twice" * 1000,
    "modeling_x.py": b"pass",
    "README.md": b"words",
    "original/params.json": b"{}",
}
SERVED = {
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model-1-of-2.safetensors",
    "model-2-of-2.safetensors",
    "model.safetensors.index.json",
}


Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def launch(capfd: pytest.CaptureFixture[str]) -> Launch:
    """Runs the launcher in this process against `server`, or an unused port; downloads are child processes."""

    def run(
        server: HubServer | None, cache: Path, *arguments: str, **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        endpoint = server.url if server is not None else "http://127.0.0.1:1"
        inherited |= {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "environ", inherited | environment)
            code = main(["--huggingface-hub-cache", str(cache), *arguments])
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return run


def downloaded(launch: Launch, server: HubServer | None, cache: Path, *arguments: str, **environment: str) -> Path:
    """The folder that `--download-only` prints."""
    result = launch(server, cache, "--download-only", *arguments, **environment)
    assert result.returncode == 0, result.stderr
    return Path(result.stdout.strip())


def test_only_needed_files_are_fetched(launch: Launch, tmp_path: Path) -> None:
    with hub({"owner/name": Repository(MODEL)}) as server:
        result = launch(server, tmp_path, "--download-only", "--model-id", "owner/name")
    assert result.returncode == 0, result.stderr
    total = sum(len(MODEL[name]) for name in SERVED)
    assert f"fetching 7 files ({readable_size(total)}) of owner/name from the hub" in result.stderr
    path = Path(result.stdout.strip())
    assert {file.name for file in path.iterdir()} == SERVED
    assert (path / "model-2-of-2.safetensors").read_bytes() == MODEL["model-2-of-2.safetensors"]
    assert path.name == commit_of(MODEL)


def test_a_warm_cache_needs_no_hub(launch: Launch, tmp_path: Path) -> None:
    with hub({"owner/name": Repository(MODEL)}) as server:
        path = downloaded(launch, server, tmp_path, "--model-id", "owner/name")
    assert downloaded(launch, None, tmp_path, "--model-id", "owner/name", HF_HUB_OFFLINE="1") == path
    # The cache is used with a warning.
    result = launch(None, tmp_path, "--download-only", "--model-id", "owner/name")
    assert result.stdout.strip() == str(path)
    assert "the hub is not reachable" in result.stderr and "WARNING" in result.stderr


def test_a_cold_cache_without_a_hub_is_an_error(launch: Launch, tmp_path: Path) -> None:
    result = launch(None, tmp_path, "--model-id", "owner/name", HF_HUB_OFFLINE="1")
    assert result.returncode == Exit.DOWNLOAD_ERROR
    assert "owner/name is not in the cache, and the hub is not reachable" in result.stderr


@pytest.mark.long
def test_an_incomplete_cache_is_an_error(launch: Launch, tmp_path: Path) -> None:
    with hub({"owner/name": Repository(MODEL)}) as server:
        path = downloaded(launch, server, tmp_path, "--model-id", "owner/name")
    (path / "model-2-of-2.safetensors").unlink()
    result = launch(None, tmp_path, "--model-id", "owner/name", HF_HUB_OFFLINE="1")
    assert result.returncode == Exit.DOWNLOAD_ERROR
    assert "lacks model-2-of-2.safetensors" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model-id", "owner/name@v1"],
        pytest.param(["--model-id", "owner/name", "--revision", "v1"], marks=pytest.mark.long),
    ],
)
def test_a_revision_selects_a_commit(launch: Launch, tmp_path: Path, arguments: list[str]) -> None:
    old = {"config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors": b"old"}
    with hub({"owner/name": Repository(MODEL, branches={"v1": old})}) as server:
        path = downloaded(launch, server, tmp_path, *arguments)
        assert (path / "model.safetensors").read_bytes() == b"old"
        assert path.name == commit_of(old)
        missing = launch(server, tmp_path, "--model-id", "owner/name@v2")
    assert missing.returncode == Exit.DOWNLOAD_ERROR
    assert "owner/name has no revision v2 at the hub" in missing.stderr
    assert downloaded(launch, None, tmp_path, *arguments, HF_HUB_OFFLINE="1") == path


def test_bin_files_are_fetched_only_without_safetensors(launch: Launch, tmp_path: Path) -> None:
    files = {"config.json": CONFIG, "tokenizer.json": b"{}", "pytorch_model.bin": b"weights"}
    files |= {"training_args.bin": b"no"}
    with hub({"name": Repository(files)}) as server:
        path = downloaded(launch, server, tmp_path, "--model-id", "name")
    assert {file.name for file in path.iterdir()} == {"config.json", "tokenizer.json", "pytorch_model.bin"}


@pytest.mark.long
def test_code_is_fetched_only_with_trust_remote_code(launch: Launch, tmp_path: Path) -> None:
    with hub({"owner/name": Repository(MODEL)}) as server:
        path = downloaded(launch, server, tmp_path, "--model-id", "owner/name", "--trust-remote-code")
    assert (path / "modeling_x.py").exists()


@pytest.mark.parametrize("variable", ["HF_TOKEN", pytest.param("HUGGING_FACE_HUB_TOKEN", marks=pytest.mark.long)])
def test_private_models_need_a_token(launch: Launch, tmp_path: Path, variable: str) -> None:
    with hub({"owner/secret": Repository(MODEL, token="hf_right")}) as server:
        path = downloaded(launch, server, tmp_path, "--model-id", "owner/secret", **{variable: "hf_right"})
        assert (path / "config.json").exists()
        result = launch(server, tmp_path / "other", "--model-id", "owner/secret")
    assert result.returncode == Exit.DOWNLOAD_ERROR
    assert "owner/secret was not found at the hub without a token" in result.stderr
    assert "hf_right" not in result.stdout + result.stderr


@pytest.mark.long
def test_a_gated_model_is_an_error(launch: Launch, tmp_path: Path) -> None:
    with hub({"owner/gated": Repository(MODEL, token="hf_right", gated=True)}) as server:
        result = launch(server, tmp_path, "--model-id", "owner/gated", HF_TOKEN="hf_wrong")
    assert result.returncode == Exit.DOWNLOAD_ERROR
    assert "owner/gated is gated" in result.stderr


@pytest.mark.long
def test_a_repository_without_a_model_is_an_error(launch: Launch, tmp_path: Path) -> None:
    bare = {"config.json": CONFIG, "tokenizer.json": b"{}"}
    with hub({"a/data": Repository({"data.csv": b""}), "a/bare": Repository(bare)}) as server:
        assert "has no config.json" in launch(server, tmp_path, "--model-id", "a/data").stderr
        assert "neither safetensors nor .bin" in launch(server, tmp_path, "--model-id", "a/bare").stderr
        assert "was not found at the hub" in launch(server, tmp_path, "--model-id", "a/none").stderr


@pytest.mark.parametrize(
    ("files", "arguments", "said"),
    [
        pytest.param(
            {"config.json": b'{"model_type": "vit"}'},
            [],
            "no causal language model of model_type 'vit'",
            id="architecture",
        ),
        pytest.param(
            {"config.json": b'{"model_type": "t5", "is_encoder_decoder": true}'},
            [],
            "it is an encoder-decoder",
            id="encoder",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {},
            ["--max-total-tokens", "2049"],
            "--max-total-tokens 2049 is above the 2048 positions of owner/name",
            id="positions",
        ),
        pytest.param(
            {"config.json": b'{"model_type": "llama", "num_attention_heads": 9}'},
            ["--num-shard", "2"],
            "cannot be split by --num-shard 2: its num_attention_heads are 9",
            id="heads",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"tokenizer.json": None}, [], "owner/name has no tokenizer.json", id="tokenizer", marks=pytest.mark.long
        ),
        pytest.param(
            {"config.json": None, "adapter_config.json": b"{}"},
            [],
            "owner/name is an adapter, not a model",
            id="adapter",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_model_that_cannot_be_served_is_not_downloaded(
    launch: Launch, tmp_path: Path, files: dict[str, bytes | None], arguments: list[str], said: str
) -> None:
    there = {name: content for name, content in {**MODEL, **files}.items() if content is not None}
    with hub({"owner/name": Repository(there)}) as server:
        result = launch(server, tmp_path, "--model-id", "owner/name", "--device", "cpu", *arguments)
        assert not any(request.endswith(".safetensors") for request in server.requests)
    assert result.returncode == Exit.ARGUMENT_VALIDATION
    assert said in result.stderr.splitlines()[-1] and result.stderr.count(said) == 1


def test_the_configuration_is_printed_without_fetching_weights(launch: Launch, tmp_path: Path) -> None:
    with hub({"owner/name": Repository(MODEL)}) as server:
        result = launch(server, tmp_path, "--model-id", "owner/name", "--print-config", "--eager-prefill", "true")
        assert not any("model-1-of-2.safetensors" in request for request in server.requests)
    assert result.returncode == 0, result.stderr
    configuration = json.loads(result.stdout)
    assert configuration["model"]["sha"] == commit_of(MODEL)
    assert configuration["flags"]["max-total-tokens"] == 2048
    assert configuration["given"]["eager-prefill"] == "--eager-prefill"
    assert "--eager-prefill has no effect" in result.stderr


@pytest.mark.long
def test_weights_from_another_folder_are_not_fetched(launch: Launch, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"mine")
    with hub({"owner/name": Repository(MODEL)}) as server:
        result = launch(
            server,
            tmp_path / "cache",
            "--model-id",
            "owner/name",
            "--weights-cache-override",
            str(weights),
            "--print-config",
        )
        assert result.returncode == 0, result.stderr
        assert not any(request.endswith(".safetensors") for request in server.requests)


def test_files_to_fetch() -> None:
    assert set(choose(MODEL, code=False)) == SERVED
    assert "pytorch_model.bin" in choose(set(MODEL) - {name for name in MODEL if "safetensors" in name}, code=False)
    assert not any("model" in name for name in choose(["model.safetensors", "config.json"], code=False, weights=False))


def test_missing_files(tmp_path: Path) -> None:
    assert missing_files(["config.json", "model.safetensors"], tmp_path, weights=True) == []
    assert missing_files(["config.json"], tmp_path, weights=True) == ["weights"]
    assert missing_files(["config.json"], tmp_path, weights=False) == []
    assert missing_files(["model.safetensors"], tmp_path, weights=True) == ["config.json"]


@pytest.mark.long
def test_a_draft_model_is_fetched_too(launch: Launch, tmp_path: Path) -> None:
    old = {**MODEL, "model-1-of-2.safetensors": b"old"}
    repositories = {"owner/name": Repository(MODEL), "owner/small": Repository(MODEL, branches={"v1": old})}
    models = ("--model-id", "owner/name", "--draft-model-id", "owner/small", "--draft-revision", "v1")
    with hub(repositories) as server:
        result = launch(server, tmp_path, "--download-only", *models)
        missing = launch(server, tmp_path, "--model-id", "owner/name", "--draft-model-id", "owner/none")
    assert result.returncode == 0, result.stderr
    base, draft = map(Path, result.stdout.splitlines())
    assert (base.name, draft.name) == (commit_of(MODEL), commit_of(old))
    assert (draft / "model-1-of-2.safetensors").read_bytes() == b"old"
    assert missing.returncode == Exit.DOWNLOAD_ERROR
    assert "owner/none was not found at the hub" in missing.stderr
