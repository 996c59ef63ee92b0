"""Which settings are rejected, and which log a warning."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lorikeet.launcher.config import rules
from lorikeet.launcher.config.flags import FLAGS
from lorikeet.launcher.config.settings import Settings, read
from lorikeet.launcher.exits import Exit, LauncherError
from lorikeet.launcher.models.model import with_lengths
from lorikeet.proto import quantization
from lorikeet.proto.pooling import PooledModel
from lorikeet.proto.quantization import FP8_KV, INTEGERS, METHODS, PACKED


def settings(*arguments: str, **environment: str) -> Settings:
    return read(arguments, environment, "box")


def refusal(*arguments: str, **environment: str) -> str:
    with pytest.raises(LauncherError) as caught:
        rules.check(settings(*arguments, **environment))
    assert caught.value.exit is Exit.ARGUMENT_VALIDATION
    return str(caught.value)


def with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Ray were installed."""
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setattr(sys.modules["ray"], "__spec__", ModuleSpec("ray", None))


REFUSED = {
    "source": "s3",
    "merge-adapter-weights": None,
}


def test_the_list_of_refused_flags_is_complete() -> None:
    assert set(REFUSED) == {name for name, flag in FLAGS.items() if flag.refused}


@pytest.mark.parametrize(("name", "text"), REFUSED.items())
def test_an_unsupported_flag_is_an_error_that_names_it(name: str, text: str | None) -> None:
    said = refusal(f"--{name}", *([text] if text is not None else []))
    assert said.startswith(f"--{name} ")
    assert said.endswith(FLAGS[name].refused)
    variable = FLAGS[name].environment
    assert refusal(**{variable: text or "true"}).startswith(f"{variable} ")


OF_WEIGHTS = sorted({*FLAGS["quantize"].choices} - {FP8_KV, *INTEGERS, *PACKED})
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize("method", OF_WEIGHTS)
def test_a_quantization_whose_package_is_missing_is_refused(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for flag in ("--quantize", "--draft-quantize"):
        draft = ["--draft-model-id", "a/b"] if flag == "--draft-quantize" else []
        said = refusal(flag, method, *draft)
        assert said.startswith(f"{flag} {method} is refused: ")
        if extra := METHODS[method].extra:
            assert said.endswith(f"pip install 'lorikeet-serve[{extra}]'")


@pytest.mark.parametrize(("method", "others"), [("eetq", ("bitsandbytes", "fp8")), ("exl2", ("gptq", "awq", "hqq"))])
def test_an_unsupported_quantization_names_alternatives(
    method: str, others: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    said = refusal("--quantize", method)
    assert all(other in said for other in others)
    for served in ("bitsandbytes", "gptq", "awq", "hqq-3bit", "fp8"):
        rules.check(settings("--quantize", served))


@pytest.mark.parametrize("method", INTEGERS)
def test_activations_are_rounded_on_the_cpu_only(method: str) -> None:
    for flags in (["--quantize", method], ["--draft-model-id", "a/b", "--draft-quantize", method]):
        for activations in ([], ["--quantize-activations", "none"]):
            values = settings(*flags, *activations)
            rules.check(values)
            rules.check_device(values, "cpu")
            rules.check_device(values, "cuda:0")
        values = settings(*flags, "--quantize-activations", "int8")
        rules.check_device(values, "cpu")
        with pytest.raises(
            LauncherError, match="--quantize-activations int8 is refused on cuda:0: 8-bit activations are"
        ):
            rules.check_device(values, "cuda:0")
    rounding = settings("--quantize-activations", "none")
    for config in ({"lorikeet_gguf": "model.gguf"}, {"quantization_config": GPTQ}):
        rules.check_models(rounding, config, None)
    with pytest.raises(LauncherError, match="--quantize-activations is refused: it needs --quantize int8, int4 or bi"):
        rules.check_models(rounding, {}, None)


def test_packed_checkpoints_need_their_package_only_where_they_are_not_multiplied_as_integers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    gptq, shuffled = settings("--quantize", "gptq"), {"quantization_config": GPTQ | {"desc_act": True}}
    rules.check(gptq)
    rules.check_models(gptq, {"quantization_config": GPTQ}, None)
    with pytest.raises(
        LauncherError, match=r"not multiplied as integers, because .*desc_act\); so it needs the package"
    ):
        rules.check_models(gptq, shuffled, None)


def test_the_checkpoint_s_quantization_is_compared_with_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    packed = {"quantization_config": {"quant_method": "awq"}}
    rules.check_models(settings("--quantize", "awq"), packed, None)
    with pytest.raises(
        LauncherError, match=r"the model cannot be served: quantised by awq: .* sample texts in advance"
    ):
        rules.check_models(settings("--quantize", "awq"), {}, None)
    drafting = settings("--draft-model-id", "a/b", "--draft-quantize", "fp8")
    with pytest.raises(LauncherError, match=r"the draft model cannot be served: .* awq already, and fp8 was asked for"):
        rules.check_models(drafting, packed, packed)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--speculative-tokens", "3", "--speculation-max-batch-size", "8"],
        ["--speculative-method", "medusa"],
        ["--speculative-method", "draft", "--draft-model-id", "a/b"],
        ["--source", "hub"],
    ],
)
def test_no_op_values_are_accepted(arguments: list[str]) -> None:
    rules.check(settings(*arguments))


WITHOUT_EFFECT = {
    "waiting-served-ratio": "0.3",
    "max-waiting-tokens": "10",
    "eager-prefill": "false",
    "disable-sgmv": None,
    "backend": "flashinfer",
    "ngrok": None,
    "ngrok-authtoken": "secret",
    "ngrok-edge": "edge",
    "predibase-api-token": "secret",
    "compile": None,
    "compile-max-batch-size": "64",
    "compile-max-rank": "32",
    "enable-lora": None,
    "max-lora-rank": "64",
    "compile-batch-size": "16",
    "cuda-memory-fraction": "0.5",
}


def test_the_list_of_flags_without_effect_is_complete() -> None:
    everywhere = {name for name, flag in FLAGS.items() if flag.no_effect and flag.no_effect_on != "cuda"}
    assert set(WITHOUT_EFFECT) == everywhere


@pytest.mark.parametrize(("name", "text"), WITHOUT_EFFECT.items())
def test_a_flag_without_effect_warns_once_if_it_is_given(name: str, text: str | None) -> None:
    values = settings(f"--{name}", *([text] if text is not None else []))
    rules.check(values)
    (said,) = rules.without_effect(values, "cpu")
    assert said.startswith(f"--{name} has no effect: ")
    assert "secret" not in said
    assert rules.without_effect(settings(), "cpu") == []


def test_memory_flags_belong_to_one_device_each() -> None:
    both = settings("--cpu-memory", "1GiB", "--cuda-memory-fraction", "0.5")
    assert [said.split()[0] for said in rules.without_effect(both, "cpu")] == ["--cuda-memory-fraction"]
    assert [said.split()[0] for said in rules.without_effect(both, "cuda:0")] == ["--cpu-memory"]


def test_flags_of_a_process_that_is_not_started_warn() -> None:
    shard = settings("--shard-listen", "127.0.0.1:1", "--api-keys", "k", "--threads", "1", "--port", "80")
    said = [sentence.split()[0] for sentence in rules.without_effect(shard, "cpu")]
    assert sorted(said) == ["--api-keys", "--port"]
    router = settings("--shard-address", "h:1", "--api-keys", "k", "--threads", "1", "--watermark-gamma", "0.4")
    said = [sentence.split()[0] for sentence in rules.without_effect(router, "cpu")]
    assert sorted(said) == ["--threads", "--watermark-gamma"]
    values = settings("--api-keys", "k", "--threads", "1")
    assert rules.without_effect(values, "cpu") == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--compile", "--eager"], "contradict"),
        (["--model-id", "a/b@c", "--revision", "d"], "give one"),
        (["--revision", "main"], "needs --model-id"),
        (["--model-id", ".", "--revision", "main"], "is on this machine"),
        (["--model-id", __file__, "--revision", "main"], "is on this machine"),
        (["--weights-cache-override", "."], "needs --model-id"),
        (["--weights-cache-override", "/nowhere", "--model-id", "a/b"], "does not exist"),
        (["--speculative-method", "draft"], "--speculative-method draft needs --draft-model-id"),
        (["--verify", "google"], "--speculative-verification rejection needs --draft-model-id"),
        (["--draft-revision", "main"], "needs --draft-model-id"),
        (["--draft-dtype", "float32"], "needs --draft-model-id"),
        (["--draft-tokenizer-id", "a/b"], "needs --draft-model-id"),
        (["--draft-model-id", "a/b@c", "--draft-revision", "d"], "give one"),
        (["--draft-model-id", ".", "--draft-revision", "main"], "is on this machine"),
        (["--ngram-min", "5", "--ngram-max", "4"], "--ngram-min 5 must be at most --ngram-max 4"),
        (["--speculative-tokens", "17"], "at most --speculative-tokens-max 16"),
        (["--tokenizer-config-path", "/nowhere.json"], "does not exist"),
        (["--shard-address", "50051"], "must look like"),
        (["--shard-address", "host:0"], "must look like"),
        (["--shard-address", "dns:shards"], "must look like"),
        (["--shard-listen", "dns:shards"], "must look like"),
        (["--shard-address", "127.0.0.1:1", "--replicas", "2"], "contradict"),
        (["--shard-listen", "127.0.0.1:1", "--replicas", "2"], "contradict"),
        (["--shard-listen", "127.0.0.1:1", "--shard-address", "127.0.0.1:1"], "give one"),
        (["--shard-listen", "127.0.0.1:1"], "anyone who can connect to 127.0.0.1:1 could use the shard"),
        (["--shard-listen", "127.0.0.1:1", "--shard-tls-cert", "a", "--shard-tls-key", "b"], "anyone who can connect"),
        (["--shard-listen", "127.0.0.1:1", "--shard-tls-cert", "a"], "go together"),
        (["--shard-listen", "127.0.0.1:1", "--shard-secret-file", "/nowhere"], "does not exist"),
        (["--shard-address", "h:1", "--shard-tls-cert", "a", "--shard-tls-key", "b"], "needs --shard-tls-ca"),
        (["--shard-secret-file", "/nowhere"], "there is no shard on TCP"),
        (["--adapter-source", "pbase"], "pbase is refused"),
        (["--adapter-id", "a b"], "is not a hub id"),
        (["--preloaded-adapter-ids", "a/b/c"], "is not a hub id"),
        (["--adapters", "/nowhere.yaml"], "does not exist"),
        (["--api-keys", "/nowhere.yaml"], "does not exist"),
        (["--device", "tpu"], "must be auto, cpu"),
        (["--device", "cpu:1"], "must be auto, cpu"),
        (["--device", "cuda:x"], "must be auto, cpu"),
    ],
)
def test_impossible_combinations(arguments: list[str], part: str) -> None:
    assert part in refusal(*arguments)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "needs --device cpu or cuda"),
        (["--device", "cuda:1"], "needs --device cpu or cuda"),
        (["--device", "cpu", "--shard-address", "h:1"], "--shard-address and --engine ray contradict each other"),
        (["--device", "cpu", "--shard-listen", "h:1", "--shard-secret-file", "."], "contradict each other"),
        (["--device", "cpu", "--shard-tls-cert", "a", "--shard-tls-key", "b"], "--shard-tls-cert is refused"),
        (["--device", "cpu", "--shard-secret-file", "/nowhere"], "does not exist"),
    ],
)
def test_settings_that_ray_decides(arguments: list[str], part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_ray(monkeypatch)
    assert part in refusal("--engine", "ray", *arguments)


def test_ray_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal("--engine", "ray", "--device", "cpu") == "--engine ray needs Ray: pip install 'lorikeet-serve[ray]'"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--max-input-length", "100", "--max-total-tokens", "100"], "must be less than --max-total-tokens 100"),
        (["--max-input-length", "8192"], "must be less than"),
        (["--max-batch-prefill-tokens", "64", "--chunked-prefill", "false"], "while --chunked-prefill is false"),
        (["--max-batch-total-tokens", "1000", "--max-total-tokens", "1001"], "at most --max-batch-total-tokens 1000"),
    ],
)
def test_impossible_lengths(arguments: list[str], part: str) -> None:
    with pytest.raises(LauncherError, match=part):
        rules.check_lengths(with_lengths(settings(*arguments), {"max_position_embeddings": 8192}))


EMBEDDER = PooledModel("embed", "mean", is_encoder=True)


@pytest.mark.parametrize(
    ("arguments", "config", "num_ranks", "part"),
    [
        (["--quantize", "bitsandbytes"], {}, 1, "cannot be quantised by bitsandbytes"),
        ([], {"quantization_config": {"quant_method": "gptq", "bits": 4}}, 1, "cannot be quantised by gptq"),
        (["--quantize", FP8_KV], {}, 1, "an fp8 KV cache is refused"),
        (["--num-shard", "2"], {}, 2, "cannot be split over 2 devices"),
        (["--speculative-tokens", "3"], {}, 1, "--speculative-tokens is refused"),
        (["--draft-model-id", "some/model"], {}, 1, "--draft-model-id is refused"),
    ],
)
def test_a_model_without_text_is_served_plainly(
    arguments: list[str], config: dict[str, Any], num_ranks: int, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "reason_against", lambda name: "")
    with pytest.raises(LauncherError, match=part):
        rules.check_pooled(settings(*arguments), EMBEDDER, config, num_ranks)
    rules.check_pooled(settings(*arguments), None, config, num_ranks)
    rules.check_pooled(settings(), EMBEDDER, {}, 1)


def test_small_steps_are_accepted_with_chunked_prefill() -> None:
    rules.check_lengths(with_lengths(settings("--max-batch-prefill-tokens", "7"), {}))


def test_an_existing_file_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer_config.json"
    file.write_text("{}")
    rules.check(settings("--tokenizer-config-path", str(file)))


@pytest.mark.parametrize(("sharded", "num_shard"), [("true", "1"), ("false", "2")])
def test_sharded_and_num_shard_must_agree(sharded: str, num_shard: str) -> None:
    said = refusal("--sharded", sharded, "--num-shard", num_shard)
    assert said == f"--sharded {sharded} and --num-shard {num_shard} contradict each other"


@pytest.mark.parametrize("arguments", [["--num-shard", "2"], ["--sharded", "true", "--num-shard", "2"]])
def test_the_rendezvous_address_has_no_effect_on_one_rank(arguments: list[str]) -> None:
    values = settings(*arguments, "--master-addr", "127.0.0.1", "--master-port", "29501")
    rules.check(values)
    assert rules.without_effect(values, "cpu", num_ranks=2) == []
    alone = rules.without_effect(values, "cpu", num_ranks=1)
    assert [line.split()[0] for line in alone] == ["--master-addr", "--master-port"]


def test_a_split_model_has_no_fused_kernels_on_cpu() -> None:
    values = settings("--disable-custom-kernels")
    assert rules.without_effect(values, "cpu") == rules.without_effect(values, "cuda:0") == []
    assert rules.without_effect(values, "cuda:0", num_ranks=2) == []  # sampling, adapters and fused modules change
    (said,) = rules.without_effect(values, "cpu", num_ranks=2)
    assert said.startswith("--disable-custom-kernels has no effect: a model that is split")


def test_symmetric_memory_needs_several_cuda_devices() -> None:
    values = settings("--symmetric-memory-all-reduce")
    rules.check(values)
    rules.check_device(values, "cuda:0", num_ranks=2)
    with pytest.raises(LauncherError, match="--symmetric-memory-all-reduce is refused on the CPU"):
        rules.check_device(values, "cpu", num_ranks=2)
    with pytest.raises(LauncherError, match=r"--symmetric-memory-all-reduce is refused: .* needs --num-shard 2"):
        rules.check_device(values, "cuda:0", num_ranks=1)
    rules.check_device(settings("--symmetric-memory-all-reduce", "--shard-address", "127.0.0.1:1"), "cpu")


FP8_KV_FLAGS = [["--kv-cache-dtype", "fp8"], ["--quantize", "fp8-kv"]]


@pytest.mark.parametrize("arguments", FP8_KV_FLAGS, ids=str)
def test_an_fp8_kv_cache_needs_cuda(arguments: list[str]) -> None:
    values = settings(*arguments)
    rules.check(values)
    rules.check_device(values, "cuda:0")
    with pytest.raises(LauncherError, match=f"{' '.join(arguments)} is refused on the CPU"):
        rules.check_device(values, "cpu")
    rules.check_device(settings(*arguments, "--shard-address", "127.0.0.1:1"), "cpu")
    rules.check_device(settings(), "cpu")


def test_both_models_have_one_kv_cache_dtype() -> None:
    assert "both models" in refusal("--draft-model-id", "a/b", "--draft-quantize", "fp8-kv")


@pytest.mark.parametrize("listed", [(), ("*",), ("https://a", "*")])
def test_credentials_need_listed_origins(listed: tuple[str, ...]) -> None:
    origins = [text for origin in listed for text in ("--cors-allow-origin", origin)]
    assert "needs --cors-allow-origin" in refusal("--cors-allow-credentials", "true", *origins)
    rules.check(settings("--cors-allow-credentials", "true", "--cors-allow-origin", "https://a"))
    rules.check(settings("--cors-allow-credentials", "false", *origins))


def test_trusted_proxies_are_networks() -> None:
    assert "10.0.0.1/8 has host bits set" in refusal("--trusted-proxies", "10.0.0.1/8")
    assert "'proxy'" in refusal("--trusted-proxies", "proxy")
    rules.check(settings("--trusted-proxies", "10.0.0.0/8", "--trusted-proxies", "2001:db8::/32"))


def test_one_body_fits_the_share_of_a_caller() -> None:
    assert "at most a fifth of --max-body-memory" in refusal("--max-body-memory", "32MiB")
    rules.check(settings("--max-body-memory", "32MiB", "--max-body-bytes", "6MiB"))


@pytest.mark.parametrize(
    "url", ["localhost:4317", "http://localhost:4317/v1/traces", "grpc://localhost:4317", "http://"]
)
def test_the_collector_is_a_url_without_a_path(url: str) -> None:
    assert refusal("--otlp-endpoint", url).startswith("--otlp-endpoint must be a URL")
    rules.check(settings("--otlp-endpoint", "https://collector.example:4317", "--otlp-sample-ratio", "0.5"))
    assert refusal("--otlp-sample-ratio", "0.5") == "--otlp-sample-ratio needs --otlp-endpoint"


@pytest.mark.parametrize(
    ("name", "wrong", "right"), [("varlen", "cpu", "cuda:0"), ("triton", "cpu", "cuda"), ("cpu", "cuda:0", "cpu")]
)
def test_an_attention_backend_is_not_replaced_by_another(name: str, wrong: str, right: str) -> None:
    values = settings("--attention", name)
    rules.check_device(values, right)
    with pytest.raises(LauncherError, match=f"--attention {name} is refused on {wrong}"):
        rules.check_device(values, wrong)


def test_adapters_may_add_tokens_to_plain_weights_on_one_device() -> None:
    flags = ("--adapter-extra-vocab-size", "8")
    for device in ("cpu", "cuda:0"):
        rules.check_device(settings(*flags), device)
        with pytest.raises(LauncherError, match="--adapter-extra-vocab-size is refused with 2 ranks"):
            rules.check_device(settings(*flags), device, num_ranks=2)
    rules.check_device(settings(*flags, "--shard-address", "127.0.0.1:1"), "cuda:0", num_ranks=2)
    for other in (("--quantize", "int8"), ("--learn-heads",)):
        with pytest.raises(LauncherError, match=rf"is refused together with {other[0]}"):
            rules.check_device(settings(*flags, *other), "cpu")
