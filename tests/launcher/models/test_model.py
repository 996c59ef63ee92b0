"""Model folders, and lengths from config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from lorikeet.adapters.refs import Ref, SourceKind
from lorikeet.launcher.config.settings import Settings, read
from lorikeet.launcher.exits import Exit, LauncherError
from lorikeet.launcher.models import model

LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 2048}


def settings(*arguments: str) -> Settings:
    return read(arguments, {}, "box")


@pytest.mark.parametrize(
    ("config", "arguments", "lengths"),
    [
        ({"max_position_embeddings": 32768}, [], (32768, 32767, 4145)),
        ({"max_position_embeddings": 32768}, ["--chunked-prefill", "false"], (32768, 32767, 32817)),
        ({"max_position_embeddings": 32768}, ["--max-batch-total-tokens", "9000"], (9000, 8999, 4145)),
        ({"max_position_embeddings": 1 << 20}, [], (1 << 18, (1 << 18) - 1, 4145)),
        ({"max_position_embeddings": 131072, "rope_scaling": LONGROPE}, [], (2048, 2047, 2097)),
        ({"max_position_embeddings": 2048}, [], (2048, 2047, 2097)),
        ({"n_positions": 1024}, [], (1024, 1023, 1073)),
        ({"text_config": {"max_position_embeddings": 512}}, [], (512, 511, 561)),
        ({}, [], (4096, 4095, 4145)),
        ({"max_position_embeddings": 32768}, ["--max-total-tokens", "9000"], (9000, 8999, 9049)),
        ({}, ["--max-input-length", "100"], (4096, 100, 150)),
        ({}, ["--max-batch-prefill-tokens", "7"], (4096, 4095, 7)),
    ],
)
def test_lengths(config: dict[str, Any], arguments: list[str], lengths: tuple[int, int, int]) -> None:
    complete = model.with_lengths(settings(*arguments), config)
    names = ("max-total-tokens", "max-input-length", "max-batch-prefill-tokens")
    assert tuple(complete[name] for name in names) == lengths


def test_a_draft_model_with_fewer_positions_bounds_the_default() -> None:
    base, draft = {"max_position_embeddings": 32768}, {"n_positions": 1024}
    assert model.with_lengths(settings(), base, draft=draft)["max-total-tokens"] == 1024
    complete = model.with_lengths(settings("--max-total-tokens", "9000"), base, draft=draft)
    assert complete["max-total-tokens"] == 9000


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/srv/models/llama", "llama"),
        ("/srv/models/llama/", "llama"),
        ("/srv/models/llama.Q4_0.gguf", "llama.Q4_0.gguf"),
        ("models/llama/.", "llama"),
        ("/root/hub/models--owner--some-name/snapshots/0a1b2c", "owner/some-name"),
    ],
)
def test_a_path_has_the_name_of_its_folder_or_file(path: str, name: str) -> None:
    assert model.ModelFolder(path, Path(path), is_local=True).name == name
    assert model.ModelFolder("owner/name", Path(path), "0a1b2c").name == "owner/name"


def test_a_folder_of_gguf_files_names_them(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"model-{number}.gguf").touch()
    with pytest.raises(LauncherError, match=r"Give one of its \.gguf files: .*model-0\.gguf.*\(and 2 more\)"):
        model.folder(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "text", "is_chat"),
    [
        ("chat_template.jinja", "x", True),
        ("tokenizer_config.json", '{"chat_template": "x"}', True),
        ("tokenizer_config.json", '{"chat_template": null}', False),
        ("tokenizer_config.json", "[]", False),
        ("tokenizer_config.json", "{", False),
    ],
)
def test_models_with_a_chat_template_are_chat_models(tmp_path: Path, file: str, text: str, is_chat: bool) -> None:
    (tmp_path / file).write_text(text)
    assert model.has_chat_template(tmp_path) == is_chat


def test_an_existing_folder_takes_precedence_over_a_hub_id(tmp_path: Path) -> None:
    path = tmp_path / "owner@main"
    path.mkdir()
    (path / "config.json").write_text("{}")
    folder = model.named(settings("--model-id", str(path)))
    assert folder == model.ModelFolder(str(path), path.resolve(), is_local=True)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=r"has no config\.json") as caught:
        model.named(settings("--model-id", str(tmp_path)))
    assert caught.value.exit is Exit.DOWNLOAD_ERROR


def test_a_hub_id_may_include_a_revision() -> None:
    assert model.named(settings("--model-id", "owner/name@v1")) == Ref(SourceKind.HUB, "owner/name", "v1")
    assert model.named(settings("--model-id", "owner/name", "--revision", "v2")) == Ref(
        SourceKind.HUB, "owner/name", "v2"
    )


@pytest.mark.parametrize(
    ("text", "sampling"),
    [
        ('{"do_sample": true, "temperature": 0.7, "top_k": 20, "eos_token_id": 2}', {"temperature": 0.7, "top_k": 20}),
        ('{"temperature": null, "top_p": "0.9", "min_p": true}', {}),
        ("[]", {}),
        ("no JSON", {}),
        (None, {}),
    ],
)
def test_the_sampling_parameters_that_a_model_recommends(
    tmp_path: Path, text: str | None, sampling: dict[str, float]
) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    assert model.recommended_sampling(tmp_path) == sampling


@pytest.mark.parametrize("name", [model.DEMO_ID, model.EMBEDDED_ID])
def test_demo_models_have_no_revisions(name: str) -> None:
    with pytest.raises(LauncherError, match=f"^--revision needs another model: {name} has no revisions$") as caught:
        model.named(settings("--model-id", name, "--revision", "main"))
    assert caught.value.exit is Exit.ARGUMENT_VALIDATION


@pytest.mark.parametrize("text", ["owner/name/more", "../x@y/..", "a b", "@main", "owner/name@", "-x/y"])
def test_an_invalid_hub_id_is_an_error(text: str) -> None:
    with pytest.raises(LauncherError):
        model.named(settings(f"--model-id={text}"))


@pytest.mark.parametrize(
    "text", ["./none", "../none", "~/none", "/none", "none/", "models/llama/7b", ".cache/llama", "llama.gguf", "a//b"]
)
def test_a_missing_path_is_not_taken_for_a_hub_id(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LauncherError, match=r"the folder .* does not exist") as caught:
        model.named(settings(f"--model-id={text}"))
    assert caught.value.exit is Exit.DOWNLOAD_ERROR


def test_a_file_and_an_adapter_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(LauncherError, match="is an adapter, not a model: give its base as --model-id"):
        model.named(settings("--model-id", str(tmp_path)))
    with pytest.raises(LauncherError, match="is a file: give a model's folder"):
        model.named(settings("--model-id", str(tmp_path / "adapter_config.json")))


def test_a_revision_may_have_slashes() -> None:
    assert model.named(settings("--model-id", "owner/name@refs/pr/1")) == Ref(SourceKind.HUB, "owner/name", "refs/pr/1")


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_a_broken_configuration_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(LauncherError, match=r"config\.json"):
        model.configuration(tmp_path)


def test_weights_of_another_folder_replace_the_model_s(tmp_path: Path) -> None:
    here, there = tmp_path / "model", tmp_path / "weights"
    here.mkdir()
    there.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (here / name).write_text("model")
    (there / "model-00001-of-00001.safetensors").write_text("weights")
    (there / "model.safetensors.index.json").write_text(json.dumps({}))
    (there / "notes.txt").write_text("")
    joined = model.with_weights_of(there, here, tmp_path / "joined")
    assert sorted(path.name for path in joined.iterdir()) == [
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert (joined / "model-00001-of-00001.safetensors").read_text() == "weights"


def test_an_empty_folder_of_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="holds no weight files"):
        model.with_weights_of(tmp_path, tmp_path, tmp_path / "joined")


def test_the_default_is_the_demo_model() -> None:
    assert model.named(settings()) == model.DemoModel(is_default=True)
    assert model.named(settings("--model-id", model.DEMO_ID)) == model.DemoModel(is_default=False)


@pytest.mark.parametrize("arguments", [("--model-id", model.EMBEDDED_ID), ("--pooling", "mean")])
def test_the_embedded_model_is_served_by_name_and_for_vectors(arguments: tuple[str, ...]) -> None:
    folder = model.named(settings(*arguments))
    assert isinstance(folder, model.ModelFolder)
    assert folder.id == model.EMBEDDED_ID
    assert model.configuration(folder.path)["model_type"] == "llama"
