"""vLLM's flags: names, adapters, templates, keys and TLS files, and what they become."""

import json
from pathlib import Path

import pytest
import trustme

from lorikeet.adapters.keys import sha256
from lorikeet.adapters.refs import Ref, SourceKind
from lorikeet.launcher.config import rules
from lorikeet.launcher.config.rules import LoraModule
from lorikeet.launcher.config.settings import Settings, read
from lorikeet.launcher.exits import LauncherError
from lorikeet.launcher.models import adapters
from lorikeet.launcher.models.model import embedded


def settings(*arguments: str, **environment: str) -> Settings:
    return read(arguments, environment, "box")


def refusal(*arguments: str, **environment: str) -> str:
    with pytest.raises(LauncherError) as caught:
        rules.check(settings(*arguments, **environment))
    return str(caught.value)


def test_a_repeated_flag_takes_several_values_at_once() -> None:
    values = settings("--served-model-name", "gpt-4o", "tgi", "--port", "81", "--served-model-name", "x")
    assert values["served-model-name"] == ("gpt-4o", "tgi", "x")
    assert values["port"] == 81


def test_max_loras_is_max_active_adapters() -> None:
    values = settings("--enable-lora", "--max-loras", "7", "--max-lora-rank", "64")
    assert values["max-active-adapters"] == 7
    assert values.origins["max-active-adapters"] == "--max-loras"
    rules.check(values)
    warnings = rules.without_effect(values, "cpu")
    assert warnings == [
        "--enable-lora has no effect: adapters are always served",
        "--max-lora-rank has no effect: adapters of any rank are served",
    ]
    with pytest.raises(LauncherError, match="--max-loras and --max-active-adapters are the same setting: give one"):
        settings("--max-loras", "7", "--max-active-adapters", "7")


def test_lora_modules_are_folders_and_ids(tmp_path: Path) -> None:
    as_json = json.dumps({"name": "b", "path": "owner/name", "base_model_name": "base"})
    values = settings("--model-id", "base", "--lora-modules", f"a={tmp_path}", as_json, "c=s3://bucket/c")
    assert rules.read_lora_modules(values) == [
        LoraModule("a", Ref(SourceKind.LOCAL, str(tmp_path))),
        LoraModule("b", Ref(SourceKind.HUB, "owner/name")),
        LoraModule("c", Ref(SourceKind.S3, "s3://bucket/c")),
    ]
    assert settings(LORA_MODULES="a=x/y b=x/z")["lora-modules"] == ("a=x/y", "b=x/z")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a", "it must look like name=path"),
        ("=x", "it must look like name=path"),
        ("a=/nowhere/at/all", "is neither a folder that exists nor a hub id"),
        ('{"name": "a", "path": "x/y", "rank": 3}', "its keys are name, path and base_model_name"),
        ('{"name": "a", "path": 3}', "its keys are name, path and base_model_name"),
        ('{"name": "a"', "Expecting"),
        ('{"name": "a", "path": "x/y", "base_model_name": "other"}', "its base_model_name is 'other'"),
        ("base=x/y", "'base' is a name of the base model"),
        ("served=x/y", "'served' is a name of the base model"),
    ],
)
def test_an_invalid_lora_module_is_an_error(text: str, part: str) -> None:
    said = refusal("--model-id", "base", "--served-model-name", "served", "--lora-modules", text)
    assert said.startswith(f"--lora-modules {text}: ")
    assert part in said


def test_two_lora_modules_of_one_name_are_an_error() -> None:
    assert "'a' is given twice" in refusal("--lora-modules", "a=x/y", "a=x/z")


def test_keys_leave_the_launcher_as_hashes_only(tmp_path: Path) -> None:
    values = settings("--api-key", "one", "two", "--adapter-store", str(tmp_path), "--lora-modules", f"a={tmp_path}")
    plan = adapters.plan(values, {}, embedded().path, tmp_path)
    assert plan.api_keys_sha256 == (sha256("one"), sha256("two"))
    assert plan.sources["local_folders"] == [str(tmp_path)]
    assert values.shown()["api-key"] == "***"
    assert settings(API_KEY="one")["api-key"] == ("one",)
    rules.check(settings("--api-key", "one", "--metrics-without-key"))
    assert "printable ASCII" in refusal("--api-key", "a key")
    assert "needs --api-keys" in refusal("--metrics-without-key")


def test_a_chat_template_is_a_file_or_a_text(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages }}")
    assert rules.read_chat_template(settings("--chat-template", str(path))) == "{{ messages }}"
    assert rules.read_chat_template(settings("--chat-template", "{{ x }}")) == "{{ x }}"
    assert rules.read_chat_template(settings()) is None
    assert "cannot be read: No such file" in refusal("--chat-template", "/nowhere.jinja")
    (tmp_path / "config.json").write_text("{}")
    both = refusal("--chat-template", "{{ x }}", "--tokenizer-config-path", str(tmp_path / "config.json"))
    assert both.endswith("both give a chat template: give one")
    path.write_bytes(b"\xff")
    assert "is not a text in UTF-8" in refusal("--chat-template", str(path))
    path.write_bytes(b"")
    assert "must have 1 to" in refusal("--chat-template", str(path))


def test_tls_files_are_read_before_anything_starts(tmp_path: Path) -> None:
    authority = trustme.CA()
    names = ("certificate", "key", "authority", "other")
    certificate, key, trusted, other = (str(tmp_path / f"{name}.pem") for name in names)
    issued = authority.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(trusted)
    authority.issue_cert("localhost").private_key_pem.write_to_path(other)
    both = ("--ssl-certfile", certificate, "--ssl-keyfile", key)
    rules.check(settings(*both))
    rules.check(settings(*both, "--ssl-ca-certs", trusted, "--ssl-cert-reqs", "2"))
    assert refusal("--ssl-certfile", certificate) == "--ssl-certfile and --ssl-keyfile go together"
    assert "cannot be used" in refusal("--ssl-certfile", certificate, "--ssl-keyfile", other)
    assert "cannot be used" in refusal(*both, "--ssl-ca-certs", key, "--ssl-cert-reqs", "2")
    assert "go together" in refusal(*both, "--ssl-ca-certs", trusted)
    assert "go together" in refusal(*both, "--ssl-cert-reqs", "1")
    assert "needs --ssl-certfile" in refusal("--ssl-ca-certs", trusted, "--ssl-cert-reqs", "1")


@pytest.mark.parametrize("path", ["llm", "/llm/", "//llm", "/é"])
def test_an_invalid_root_path_is_an_error(path: str) -> None:
    assert "must be a path such as /llm" in refusal("--root-path", path)
