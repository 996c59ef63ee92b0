"""Default adapters and their folders."""

from pathlib import Path

import pytest

from lorikeet.launcher.config.settings import read
from lorikeet.launcher.models import adapters
from lorikeet.launcher.models.model import embedded

FAMILY = embedded().path.parent
ENVIRONMENT = {"HF_HUB_CACHE": "/data"}


def test_the_demo_model_includes_its_adapters() -> None:
    settings = adapters.with_demo_adapters(read([], {}, "box"), ENVIRONMENT, FAMILY)
    assert Path(settings["adapters"]).is_relative_to(FAMILY)
    assert settings["local-adapter-root"] == (str(FAMILY / "adapters"), str(FAMILY), "/data")


def test_the_demo_model_has_other_adapters_when_it_embeds() -> None:
    settings = adapters.with_demo_adapters(read(["--pooling", "mean"], {}, "box"), ENVIRONMENT, FAMILY)
    assert settings["adapters"] == str(FAMILY / "embedders.yaml") and adapters.serves_demo_adapters(settings, FAMILY)


@pytest.mark.parametrize("flag", ["--adapters", "--local-adapter-root"])
def test_given_adapters_replace_the_demo_s(flag: str) -> None:
    settings = read([flag, "something"], {}, "box")
    assert adapters.with_demo_adapters(settings, ENVIRONMENT, FAMILY) == settings


def test_another_model_has_no_adapters_of_the_demo() -> None:
    settings = read(["--model-id", "owner/name"], {}, "box")
    assert adapters.with_demo_adapters(settings, ENVIRONMENT, None) == settings
    assert not adapters.serves_demo_adapters(settings, None)


def test_the_default_adapter_root_need_not_exist(tmp_path: Path) -> None:
    settings = adapters.with_demo_adapters(read([], {}, "box"), {"HF_HUB_CACHE": str(tmp_path / "later")}, FAMILY)
    planned = adapters.plan(settings, {"HF_HUB_CACHE": str(tmp_path / "later")}, FAMILY / "base", tmp_path)
    assert planned.roots == (str(FAMILY / "adapters"), str(FAMILY), str(tmp_path / "later"))


@pytest.mark.parametrize(
    ("arguments", "variables", "prefixes", "warns"),
    [
        ([], {}, None, False),
        ([], {"AWS_ACCESS_KEY_ID": "x"}, None, True),
        (["--api-keys", "keys"], {"AWS_ACCESS_KEY_ID": "x"}, (), False),
        (["--api-keys", "keys", "--s3-prefix", "a/b", "--s3-prefix", "c"], {}, ("a/b", "c"), False),
        ([], {"PREDIBASE_MODEL_BUCKET": "m", "PREDIBASE_MODEL_FOLDER": "f/"}, ("m/f",), False),
        (["--s3-prefix", "a"], {"PREDIBASE_MODEL_BUCKET": "m", "AWS_ACCESS_KEY_ID": "x"}, ("a",), False),
    ],
)
def test_where_callers_may_name_adapters_in_s3(
    arguments: list[str], variables: dict[str, str], prefixes: tuple[str, ...] | None, warns: bool, tmp_path: Path
) -> None:
    if "keys" in arguments:
        (tmp_path / "keys").write_text("[]")
        arguments = [str(tmp_path / "keys") if word == "keys" else word for word in arguments]
    environment = {"HF_HUB_CACHE": str(tmp_path / "cache"), **variables}
    planned = adapters.plan(read(arguments, {}, "box"), environment, FAMILY / "base", tmp_path)
    assert planned.s3_prefixes == prefixes
    assert ("--s3-prefix" in planned.s3_warning) == warns
