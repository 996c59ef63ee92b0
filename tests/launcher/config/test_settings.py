"""How flags and variables become settings."""

import pytest

from lorikeet.launcher.config.flag import FlagKind
from lorikeet.launcher.config.flags import FLAGS, MOST_USED
from lorikeet.launcher.config.settings import Settings, help_page, parser, read
from lorikeet.launcher.exits import Exit, LauncherError


def settings(*arguments: str, **environment: str) -> Settings:
    return read(arguments, environment, "box")


def sentence(*arguments: str, **environment: str) -> str:
    with pytest.raises(LauncherError) as caught:
        settings(*arguments, **environment)
    assert caught.value.exit is Exit.ARGUMENT_VALIDATION
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_given_is_every_default() -> None:
    empty = settings()
    assert dict(empty.values) == {name: flag.default for name, flag in FLAGS.items()}
    assert not empty.origins


def test_a_flag_overrides_its_variable() -> None:
    both = settings("--port", "81", PORT="80")
    assert both["port"] == 81
    assert both.origins == {"port": "--port"}
    assert settings(PORT="80").origins == {"port": "PORT"}
    assert settings("-p", "81")["port"] == settings("--port=81")["port"] == 81


@pytest.mark.parametrize("name", [name for name, flag in FLAGS.items() if flag.kind is FlagKind.SWITCH])
def test_switches_take_no_value(name: str) -> None:
    assert settings(f"--{name}")[name] is True
    assert sentence(f"--{name}", "true").startswith("'true' belongs to no flag")


@pytest.mark.parametrize("name", [name for name, flag in FLAGS.items() if flag.kind is FlagKind.BOOLEAN])
def test_booleans_take_one(name: str) -> None:
    assert settings(f"--{name}", "false")[name] is False
    assert settings(f"--{name}=true")[name] is True
    assert "expected one argument" in sentence(f"--{name}")
    assert sentence(f"--{name}", "perhaps") == f"--{name} must be true or false, not 'perhaps'"


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("false", False), ("0", False)])
def test_variables_set_switches_too(text: str, value: bool) -> None:
    assert settings(JSON_OUTPUT=text)["json-output"] is value
    assert settings(PREFIX_CACHING=text)["prefix-caching"] is value


def test_an_empty_variable_is_none() -> None:
    assert settings(MAX_BEST_OF="", MODEL_ID="").origins == {}


def test_repeated_flags_gather_and_their_variable_has_commas() -> None:
    assert settings("--cors-allow-origin", "a", "--cors-allow-origin", "b")["cors-allow-origin"] == ("a", "b")
    assert settings(CORS_ALLOW_ORIGIN="a, b")["cors-allow-origin"] == ("a", "b")


def test_hostname_that_every_shell_sets_is_not_an_address() -> None:
    assert settings(HOSTNAME="box")["hostname"] == settings(HOSTNAME="box.example.org")["hostname"] == "0.0.0.0"
    assert settings(HOSTNAME="127.0.0.1")["hostname"] == "127.0.0.1"
    assert settings("--hostname", "box")["hostname"] == settings(LORIKEET_HOSTNAME="box")["hostname"] == "box"


@pytest.mark.parametrize("name", ["PORT", "LORIKEET_PORT"])
def test_an_error_names_the_variable_that_was_set(name: str) -> None:
    with pytest.raises(LauncherError, match=f"^{name} must be an integer, not 'tcp://10.0.0.1:80'"):
        settings(**{name: "tcp://10.0.0.1:80"})


def test_the_first_word_is_the_model() -> None:
    named = settings("owner/name", "--port", "81")
    assert (named["model-id"], named["port"]) == ("owner/name", 81)


def test_a_prefix_separates_variables_from_those_of_other_programs() -> None:
    assert settings(LORIKEET_PORT="81", PORT="80")["port"] == 81
    assert settings(LORIKEET_CORS_ALLOW_ORIGIN="a, b")["cors-allow-origin"] == ("a", "b")
    assert settings("--port", "82", LORIKEET_PORT="81")["port"] == 82


def test_help_shows_the_most_used_flags_unless_asked_for_all() -> None:
    short, full = help_page(["--port", "80", "-h"]), help_page(["--help=all"])
    assert all(f"--{name}" in short for name in MOST_USED) and len(MOST_USED) == 20
    assert "--help=all" in short and "--otlp-endpoint" not in short
    assert all(f"--{name}" in full for name in FLAGS)
    assert help_page(["--port", "80"]) == ""


def test_a_variable_does_not_set_the_flag_that_has_none() -> None:
    assert settings(ENV="production")["env"] is False


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--max-total-token", "1"], "unknown flag --max-total-token: did you mean --max-total-tokens?"),
        (["--max-total"], "unknown flag --max-total"),
        (["--xyzzy=3"], "unknown flag --xyzzy"),
        (["--port", "80", "model"], "'model' belongs to no flag: name the model first"),
        (["model", "--model-id", "other"], "'model' and --model-id both name the model"),
        (["--versoin"], "unknown flag --versoin: did you mean --version?"),
        (["--port"], "--port/-p: expected one argument"),
        (["--port", "http"], "--port must be an integer, not 'http'"),
        (["--port", "0"], "--port must be at least 1, not 0"),
        (["--port", "70000"], "--port must be at most 65535, not 70000"),
        (["--validation-workers", "0"], "--validation-workers must be at least 1"),
        (["--dtype", "int8"], "--dtype must be one of float16, bfloat16, float32, auto, not 'int8'"),
        (["--watermark-delta", "nan"], "--watermark-delta must be a finite number"),
        (["--model-id", "a\0b"], "--model-id holds a NUL byte"),
    ],
)
def test_an_error_is_one_sentence(arguments: list[str], start: str) -> None:
    assert sentence(*arguments).startswith(start)


def test_an_error_names_the_variable() -> None:
    assert sentence(MAX_BEST_OF="two") == "MAX_BEST_OF must be an integer, not 'two'"


def test_secrets_are_not_shown() -> None:
    printable = settings("--ngrok-authtoken", "hunter2", PREDIBASE_API_TOKEN="hunter3").shown()
    assert "hunter" not in str(printable)
    assert printable["ngrok-authtoken"] == "***"


def test_help_names_every_flag_and_variable() -> None:
    text = parser().format_help()
    for name, flag in FLAGS.items():
        assert f"--{name}" in text
        assert flag.environment in text


def test_a_deprecated_name_is_accepted_with_a_warning() -> None:
    for arguments in (["--verify", "google"], ["--verify=google"]):
        values = settings(*arguments)
        assert values["speculative-verification"] == "rejection"
        assert values.origins == {"speculative-verification": "--speculative-verification"}
        assert values.deprecated == ("--verify is deprecated: use --speculative-verification",)
    values = settings(VERIFY="coupled")
    assert (values["speculative-verification"], values.origins) == (
        "shared-noise",
        {"speculative-verification": "SPECULATIVE_VERIFICATION"},
    )
    assert values.deprecated == ("VERIFY is deprecated: use SPECULATIVE_VERIFICATION",)
    assert settings("--speculative-verification", "rejection").deprecated == ()
