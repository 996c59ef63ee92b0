"""Flags from a file: our names, AutoGluon-RAG's two fragments, and errors."""

from pathlib import Path

import pytest

from lorikeet.launcher.config.settings import Settings, asks_for_json, read
from lorikeet.launcher.exits import Exit, LauncherError

HUGGINGFACE = """
generator_model_name: meta-llama/Llama-3.1-8B
generator_model_platform: huggingface
generator_model_platform_args:
  hf_generate_params:
    assistant_model: meta-llama/Llama-3.2-1B
"""
VLLM = """
generator_model_name: facebook/opt-6.7b
generator_model_platform: vllm
generator_model_platform_args:
  vllm_init_params:
    speculative_model: facebook/opt-125m
    num_speculative_tokens: 5
"""


def settings(path: Path, text: str, *arguments: str, **environment: str) -> Settings:
    file = path / "rag.yaml"
    file.write_text(text)
    return read(["--config", str(file), *arguments], environment, "box")


def given(path: Path, text: str, *arguments: str) -> dict[str, object]:
    values = settings(path, text, *arguments)
    return {name: values[name] for name in values.origins if name != "config"}


def refusal(path: Path, text: str) -> str:
    with pytest.raises(LauncherError) as caught:
        settings(path, text)
    assert caught.value.exit is Exit.ARGUMENT_VALIDATION
    said = str(caught.value)
    assert "\n" not in said and str(path / "rag.yaml") in said
    return said.replace(str(path / "rag.yaml"), "FILE")


def test_flags_by_name(tmp_path: Path) -> None:
    text = "port: 81\nprefix_caching: false\njson-output: true\ncors-allow-origin: [a, b]\n"
    text += "model-id: null\ncpu-memory: 1GiB\n"
    values = settings(tmp_path, text)
    assert (values["port"], values["prefix-caching"], values["json-output"]) == (81, False, True)
    assert (values["cors-allow-origin"], values["cpu-memory"], values["model-id"]) == (
        ("a", "b"),
        2**30,
        None,
    )
    assert values.origins["port"] == f"port in {tmp_path / 'rag.yaml'}"
    assert "model-id" not in values.origins
    assert given(tmp_path, "cors-allow-origin: a") == {"cors-allow-origin": ("a",)}
    assert given(tmp_path, "") == {}


def test_flags_and_variables_go_before_it(tmp_path: Path) -> None:
    assert settings(tmp_path, "port: 81", "--port", "82", PORT="83")["port"] == 82
    assert settings(tmp_path, "port: 81", PORT="83")["port"] == 83
    assert given(tmp_path, VLLM, "--speculative-tokens", "2")["speculative-tokens"] == 2


def test_what_autogluon_rag_documents(tmp_path: Path) -> None:
    expected = {"model-id": "meta-llama/Llama-3.1-8B", "draft-model-id": "meta-llama/Llama-3.2-1B"}
    assert given(tmp_path, HUGGINGFACE) == expected
    section = "generator:\n" + "".join(f"  {line}\n" for line in HUGGINGFACE.splitlines())
    assert given(tmp_path, section) == expected
    small = {"model-id": "facebook/opt-6.7b", "draft-model-id": "facebook/opt-125m", "speculative-tokens": 5}
    assert given(tmp_path, VLLM) == small
    assert given(tmp_path, VLLM + "port: 81\n") == {**small, "port": 81}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("hf_generate_params: {assistant_tokenizer: a/b}", {"draft-tokenizer-id": "a/b"}),
        ("hf_generate_params: {num_assistant_tokens: 7}", {"speculative-tokens": 7}),
        (
            "hf_generate_params: {num_assistant_tokens_schedule: heuristic}",
            {"speculative-schedule": "heuristic"},
        ),
        ("hf_model_params: {torch_dtype: bfloat16, trust_remote_code: true}", {"dtype": "bfloat16", "trust": True}),
        ("vllm_init_params: {max_model_len: 900, dtype: float32}", {"max-total-tokens": 900, "dtype": "float32"}),
        (
            "vllm_init_params: {speculative_config: {model: a/b, num_speculative_tokens: 2}}",
            {"draft-model-id": "a/b", "speculative-tokens": 2},
        ),
    ],
)
def test_other_spellings_of_the_same(tmp_path: Path, arguments: str, expected: dict[str, object]) -> None:
    values = given(tmp_path, f"generator_model_platform_args: {{{arguments}}}")
    assert values == {name.replace("trust", "trust-remote-code"): value for name, value in expected.items()}


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        ("hf_generate_params: {prompt_lookup_num_tokens: 10}", 10),
        ("vllm_init_params: {speculative_model: '[ngram]', num_speculative_tokens: 5}", 5),
        ("vllm_init_params: {speculative_config: {method: ngram, num_speculative_tokens: 3}}", 3),
    ],
)
def test_prompt_lookup_by_their_names(tmp_path: Path, arguments: str, tokens: int) -> None:
    values = given(tmp_path, f"generator_model_platform_args: {{{arguments}}}")
    assert values["speculative-method"] in ("lookup", "ngram") and values["speculative-tokens"] == tokens
    assert "draft-model-id" not in values


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 80", "prot in FILE is neither a flag nor a key of AutoGluon-RAG's generator"),
        ("config: other.yaml", "config in FILE is neither a flag"),
        ("generator: {num_gpus: 1}", "generator.num_gpus in FILE is not a known key"),
        ("generator_model_platform: bedrock", "generator_model_platform in FILE must be one of huggingface, vllm"),
        (
            "generator_model_platform_args: {hf_generate_params: {max_new_tokens: 5}}",
            "generator_model_platform_args.hf_generate_params.max_new_tokens in FILE belongs to requests",
        ),
        (
            "generator_model_platform_args: {vllm_sampling_params: {top_p: 0.9}}",
            "generator_model_platform_args.vllm_sampling_params in FILE belongs to requests",
        ),
        ("speculative-tokens: 2.5", "speculative-tokens in FILE must be an integer, not '2.5'"),
        ("speculative-tokens: -1", "speculative-tokens in FILE must be at least 0, not -1"),
        ("port: {a: 1}", "port in FILE must be one value"),
        ("port: [1, 2]", "port in FILE must be one value"),
        ("port: 80\nPort: 81", "Port in FILE is neither"),
        ("model_id: a\nmodel-id: b", "model-id in FILE and model_id in FILE are two values of --model-id"),
        ("- a", "what is in FILE must be keys and values"),
        ("generator: 3", "generator in FILE must be keys and values"),
        ("a: [", "--config FILE is not YAML: "),
    ],
)
def test_an_error_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    assert refusal(tmp_path, text).startswith(said)


def test_it_decides_how_errors_are_written_too(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("json-output: true\nprot: 80\n")
    assert not asks_for_json(["--config", str(file)], {})  # invalid YAML
    file.write_text("json-output: true\nport: http\n")
    assert asks_for_json(["--config", str(file)], {}) and asks_for_json([f"--config={file}"], {})
    assert not asks_for_json(["--config", str(file)], {"JSON_OUTPUT": "false"})
    assert asks_for_json([], {"LORIKEET_JSON_OUTPUT": "true", "JSON_OUTPUT": "false"})
    assert not asks_for_json(["--config"], {}) and not asks_for_json(["--config", "/nowhere"], {})


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=r"--config /nowhere\.yaml cannot be read: No such file"):
        read(["--config", "/nowhere.yaml"], {}, "box")


def test_a_deprecated_key_is_accepted_with_a_warning(tmp_path: Path) -> None:
    values = settings(tmp_path, "verify: rejection")
    assert values["speculative-verification"] == "rejection"
    assert values.deprecated == (f"verify in {tmp_path / 'rag.yaml'} is deprecated: use speculative-verification",)
