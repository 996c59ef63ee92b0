"""Which settings conflict, which are not supported, and which have no effect: checked before anything is started.

It also reads the values that need a file or the environment: chat template, LoRA modules, usage records.
"""

import importlib.util
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lorikeet.adapters import refs
from lorikeet.launcher.config.flag import LAUNCHER, SHARD
from lorikeet.launcher.config.flags import FLAGS
from lorikeet.launcher.config.settings import Settings
from lorikeet.launcher.exits import refuse
from lorikeet.proto import quantization
from lorikeet.proto.pooling import PooledModel

OF_ROUTERS = frozenset(name for name, flag in FLAGS.items() if flag.to and not flag.to & (SHARD | LAUNCHER))
"""Flags without effect if there is no router."""
OF_SHARDS = frozenset(name for name, flag in FLAGS.items() if flag.to == SHARD)
"""Flags without effect if no shard is started."""


def check(settings: Settings) -> None:
    """Raise LauncherError with one sentence for the first setting that cannot be served."""
    for name, flag in FLAGS.items():
        if flag.refused and name in settings.origins and settings[name] not in flag.harmless:
            refuse(f"{settings.origins[name]} {_shown(settings, name)} is refused: {flag.refused}")
    _check_pairs(settings)
    _check_ranks(settings)
    _check_shards(settings)
    _check_ray(settings)
    _check_adapters(settings)
    _check_speculation(settings)
    _check_quantization(settings)
    _check_files(settings)
    _check_clients(settings)
    _check_http(settings)


_NEEDS_INTEGERS = (
    "it needs --quantize int8, int4 or bitsandbytes, a .gguf file, or a GPTQ or AWQ checkpoint that is multiplied as "
    "integers"
)


def is_closed(settings: Settings) -> bool:
    """Whether the server has API keys."""
    return settings["api-keys"] is not None or bool(settings["api-key"])


_ATTENTION_ON_CPU = {"varlen": False, "triton": False, "cpu": True}
"""Attention backends that run only on the CPU (True) or only on CUDA (False)."""


def check_device(settings: Settings, device: str, num_ranks: int = 1) -> None:
    """Raise LauncherError for a setting that `device`, or that number of ranks, does not support."""
    if kv_cache_dtype(settings) == "fp8" and device == "cpu" and not settings["shard-address"]:
        name = "quantize" if settings["quantize"] == quantization.FP8_KV else "kv-cache-dtype"
        refuse(f"{settings.origins[name]} {settings[name]} is refused on the CPU: an fp8 KV cache needs CUDA")
    if settings["quantize-activations"] == "int8" and device != "cpu" and not settings["shard-address"]:
        origin = settings.origins["quantize-activations"]
        refuse(f"{origin} int8 is refused on {device}: 8-bit activations are supported on CPU only; omit the flag")
    _check_extra_rows(settings, num_ranks)
    if settings["learn-heads"] and device != "cpu" and not settings["shard-address"]:
        refuse(f"{settings.origins['learn-heads']} is refused on {device}: heads are learned on the CPU only")
    attention, is_cpu = settings["attention"], device == "cpu"
    if attention in _ATTENTION_ON_CPU and _ATTENTION_ON_CPU[attention] != is_cpu and not settings["shard-address"]:
        needed = "a CUDA device" if is_cpu else "--device cpu"
        refuse(f"{settings.origins['attention']} {attention} is refused on {device}: it needs {needed}; omit the flag")
    if settings["symmetric-memory-all-reduce"] and not settings["shard-address"]:
        origin = settings.origins["symmetric-memory-all-reduce"]
        if device == "cpu":
            refuse(f"{origin} is refused on the CPU: only CUDA devices have symmetric memory")
        if num_ranks == 1:
            refuse(f"{origin} is refused: a model on one device has nothing to add up; it needs --num-shard 2 or more")


def _check_extra_rows(settings: Settings, num_ranks: int) -> None:
    if not settings["adapter-extra-vocab-size"] or settings["shard-address"]:
        return
    origin = settings.origins["adapter-extra-vocab-size"]
    if num_ranks > 1:
        refuse(f"{origin} is refused with {num_ranks} ranks: adapters may add tokens on one device only")
    for name in ("quantize", "learn-heads"):
        if settings[name]:
            refuse(f"{origin} is refused together with {settings.origins[name]}")


def kv_cache_dtype(settings: Settings) -> str:
    """`fp8`, or `auto` for the model's; `--quantize fp8-kv` is LoRAX's name for the former."""
    return "fp8" if settings["quantize"] == quantization.FP8_KV else str(settings["kv-cache-dtype"])


def check_lengths(settings: Settings, pooled: PooledModel | None = None) -> None:
    """Raise LauncherError for lengths that contradict each other, once their defaults are computed."""
    longest, total = settings["max-input-length"], settings["max-total-tokens"]
    if pooled is not None and longest > total:
        refuse(f"--max-input-length {longest} must be at most --max-total-tokens {total}")
    if pooled is None and longest >= total:
        refuse(f"--max-input-length {longest} must be less than --max-total-tokens {total}: output needs room too")
    step = settings["max-batch-prefill-tokens"]
    is_whole = pooled is not None and pooled.is_whole
    if (is_whole or not settings["chunked-prefill"]) and step < longest:
        reason = "because this model computes a prompt in one step" if is_whole else "while --chunked-prefill is false"
        refuse(f"--max-batch-prefill-tokens {step} must be at least --max-input-length {longest} {reason}")
    everything = settings["max-batch-total-tokens"]
    if everything is not None and total > everything:
        refuse(f"--max-total-tokens {total} must be at most --max-batch-total-tokens {everything}")


def check_models(settings: Settings, base: dict[str, Any], draft: dict[str, Any] | None) -> None:
    """Raise LauncherError for a quantization method that does not fit the model of `base` or `draft`."""
    if settings["shard-address"]:
        return
    can_round = False
    for name, model, config in (("quantize", "the model", base), ("draft-quantize", "the draft model", draft)):
        try:
            if config is not None:
                method = quantization.choose(settings[name], config)
                can_round = can_round or quantization.multiplies_integers(method, config)
        except ValueError as reason:
            refuse(f"{model} cannot be served: {reason}")
    if settings["quantize-activations"] is not None and not can_round:
        refuse(f"{settings.origins['quantize-activations']} is refused: {_NEEDS_INTEGERS}")


def check_pooled(settings: Settings, pooled: PooledModel | None, config: dict[str, Any], num_ranks: int) -> None:
    """Raise LauncherError for a setting that a pooled model does not support. `config` is its config.json."""
    if pooled is None:
        return
    kind = f"a model of the task {pooled.task}"
    for name in ("draft-model-id", "speculative-tokens", "learn-heads", "adapter-extra-vocab-size"):
        if name in settings.origins and settings[name]:
            refuse(f"{settings.origins[name]} is refused: {kind} generates no text")
    if settings["shard-address"]:
        return
    if num_ranks > 1:
        refuse(f"{kind} cannot be split over {num_ranks} devices: use --num-shard 1, and --replicas for more devices")
    if kv_cache_dtype(settings) == "fp8":
        refuse(f"an fp8 KV cache is refused: {kind} is served in its own dtype")
    if method := quantization.of_checkpoint(config) or quantization.of_weights(settings["quantize"]):
        refuse(f"{kind} cannot be quantised by {method}: serve the plain weights, without --quantize")


def without_effect(settings: Settings, device: str, num_ranks: int = 1) -> list[str]:
    """One sentence for each given flag that has no effect on `device`, or with that number of ranks."""
    reasons: dict[str, str] = {}
    for name, flag in FLAGS.items():
        if flag.no_effect and device.startswith(flag.no_effect_on):
            reasons[name] = flag.no_effect
    if num_ranks == 1:
        reasons |= dict.fromkeys(("master-addr", "master-port"), "the model is not split over several devices")
    elif device.startswith("cpu"):
        reasons["disable-custom-kernels"] = "a model that is split has no fused kernels on CPU"
    if settings["shard-listen"] is not None:
        reasons |= dict.fromkeys(OF_ROUTERS, "with --shard-listen no router is started here, which would read it")
    elif settings["shard-address"]:
        reasons |= dict.fromkeys(OF_SHARDS, "with --shard-address no shard is started here, which would read it")
    return [f"{origin} has no effect: {reasons[name]}" for name, origin in settings.origins.items() if name in reasons]


def _check_adapters(settings: Settings) -> None:
    for name in ("adapter-source", "default-adapter-source", "preloaded-adapter-source"):
        if settings[name] == "pbase":
            refuse(f"{settings.origins[name]} pbase is refused: Predibase's service is closed to other servers")
    preloaded = settings["preloaded-adapter-source"] or settings["adapter-source"]
    names = [("adapter-id", name, settings["adapter-source"]) for name in filter(None, [settings["adapter-id"]])]
    names += [("preloaded-adapter-ids", name, preloaded) for name in settings["preloaded-adapter-ids"]]
    for flag, name, source in names:
        try:
            refs.parse(name, refs.SourceKind(source))
        except ValueError as error:
            refuse(f"{settings.origins[flag]}: {error}")
    for key in settings["api-key"]:
        if not key or not all("!" <= character <= "~" for character in key):
            refuse(f"{settings.origins['api-key']} must consist of printable ASCII characters without spaces")
    read_lora_modules(settings)


def _check_pairs(settings: Settings) -> None:
    model = settings["model-id"]
    for name in ("api-keys-optional", "metrics-without-key", "share-prefixes"):
        if settings[name] and not is_closed(settings):
            refuse(f"{settings.origins[name]} needs --api-keys: without it the server is open to everyone")
    if settings["speculative-history"] and not settings["history-memory"]:
        refuse(f"{settings.origins['speculative-history']} needs memory: --history-memory is 0")
    if settings["compile"] and settings["eager"]:
        refuse("--compile and --eager contradict each other")
    if settings["revision"] is not None:
        if model is None:
            refuse("--revision needs --model-id: the built-in demo model has no revisions")
        _check_revision(settings, "model-id", "revision")
    if settings["weights-cache-override"] is not None and model is None:
        refuse("--weights-cache-override needs --model-id: the built-in demo model includes its weights")
    device = settings["device"]
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (":" in device and not (kind == "cuda" and number.isdecimal())):
        refuse(f"--device must be auto, cpu, cuda or cuda:N, not {device!r}")


def _check_ranks(settings: Settings) -> None:
    """Tensor parallelism."""
    sharded, num_shard = settings["sharded"], settings["num-shard"]
    if num_shard is not None and sharded is not None and sharded != (num_shard > 1):
        refuse(f"--sharded {str(sharded).lower()} and --num-shard {num_shard} contradict each other")


def _check_shards(settings: Settings) -> None:
    """Addresses of shards, and authentication between routers and shards."""
    elsewhere, listen = settings["shard-address"], settings["shard-listen"]
    for address in (*elsewhere, *filter(None, [listen])):
        if not address.startswith("file:/") and not _is_address(address.removeprefix("dns:")):
            refuse(f"the address of a shard must look like 127.0.0.1:50051, not {address!r}")
    if elsewhere and listen is not None:
        refuse("--shard-listen starts a shard, and --shard-address uses remote shards: give one")
    for name in ("shard-address", "shard-listen"):
        if settings[name] and settings["replicas"] > 1:
            refuse(f"--{name} and --replicas {settings['replicas']} contradict each other: replicas are local")
    is_remote = bool(elsewhere) or listen is not None
    for name in ("shard-secret-file", "shard-tls-cert", "shard-tls-key", "shard-tls-ca"):
        if settings[name] is not None and not (is_remote or settings["engine"] == "ray"):
            refuse(f"--{name} needs --shard-address, --shard-listen or --engine ray: there is no shard on TCP")
    if (settings["shard-tls-cert"] is None) != (settings["shard-tls-key"] is None):
        refuse("--shard-tls-cert and --shard-tls-key go together")
    if elsewhere and settings["shard-tls-cert"] is not None and settings["shard-tls-ca"] is None:
        refuse("--shard-tls-cert needs --shard-tls-ca to verify the certificates of remote shards")
    has_authority = settings["shard-tls-cert"] is not None and settings["shard-tls-ca"] is not None
    if listen is not None and settings["shard-secret-file"] is None and not has_authority:
        refuse(
            f"anyone who can connect to {listen} could use the shard: --shard-listen needs --shard-secret-file, or"
            " --shard-tls-cert, --shard-tls-key and --shard-tls-ca"
        )


def _check_ray(settings: Settings) -> None:
    """Settings that Ray decides."""
    if settings["engine"] != "ray":
        return
    if importlib.util.find_spec("ray") is None:
        refuse("--engine ray needs Ray: pip install 'lorikeet-serve[ray]'")
    for name in ("shard-address", "shard-listen"):
        if settings[name]:
            refuse(f"{settings.origins[name]} and --engine ray contradict each other: Ray chooses the addresses")
    for name in ("shard-tls-cert", "shard-tls-key", "shard-tls-ca"):
        if settings[name] is not None:
            refuse(f"{settings.origins[name]} is refused with --engine ray: Ray chooses the nodes later")
    if settings["device"] not in ("cpu", "cuda"):
        refuse("--engine ray needs --device cpu or cuda: the devices of Ray's nodes are not known here")


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(colon and host) and port.isdecimal() and 0 < int(port) < 65536


def _check_revision(settings: Settings, name: str, revision: str) -> None:
    model = settings[name]
    if settings[revision] is not None:
        if Path(model).exists():
            refuse(f"--{revision} needs a hub id, and {model} is on this machine")
        if "@" in model:
            refuse(f"--{revision} and the revision in --{name} {model} contradict each other: give one")


def _check_speculation(settings: Settings) -> None:
    shortest, longest = settings["ngram-min"], settings["ngram-max"]
    if shortest > longest:
        refuse(f"--ngram-min {shortest} must be at most --ngram-max {longest}")
    draft = settings["draft-model-id"]
    if draft is None:
        for name in ("draft-revision", "draft-tokenizer-id", "draft-dtype", "draft-quantize"):
            if settings[name] is not None:
                refuse(f"{settings.origins[name]} needs --draft-model-id")
        for name, value in (("speculative-method", "draft"), ("speculative-verification", "rejection")):
            if settings[name] == value:
                refuse(f"{settings.origins[name]} {value} needs --draft-model-id")
    else:
        _check_revision(settings, "draft-model-id", "draft-revision")
    if settings["learn-heads"]:
        _check_learning(settings)
    num_tokens, max_tokens = settings["speculative-tokens"] or 0, settings["speculative-tokens-max"]
    if num_tokens > max_tokens:
        refuse(f"--speculative-tokens {num_tokens} must be at most --speculative-tokens-max {max_tokens}")


def _check_learning(settings: Settings) -> None:
    """What keeps heads from being learned, or learned ones from being used."""
    origin = settings.origins["learn-heads"]
    if settings["draft-model-id"] is not None:
        refuse(f"{origin} is refused with --draft-model-id: the heads would take the place of the draft model")
    if settings["speculative-method"] not in ("auto", "medusa"):
        refuse(f"{origin} needs --speculative-method auto or medusa")
    if not settings["learning-memory"] and not settings["shard-address"]:
        refuse(f"{origin} needs --learning-memory")


def _check_quantization(settings: Settings) -> None:
    for name in ("quantize", "draft-quantize"):
        method = settings[name]
        if name == "draft-quantize" and method == quantization.FP8_KV:
            refuse(f"{settings.origins[name]} {method} is refused: --kv-cache-dtype fp8 applies to both models")
        if method is None or method in quantization.PACKED or settings["shard-address"]:
            continue  # files of GPTQ and AWQ may need no package
        if reason := quantization.reason_against(method):
            refuse(f"{settings.origins[name]} {method} is refused: {reason}")


def _check_clients(settings: Settings) -> None:
    """Browsers, and proxies in front of the server."""
    origins = settings["cors-allow-origin"]
    if settings["cors-allow-credentials"] and (not origins or "*" in origins):
        refuse(
            "--cors-allow-credentials true needs --cors-allow-origin with the sites that may send credentials: with any"
            " origin, every site could use a visitor's"
        )
    for network in settings["trusted-proxies"]:
        try:
            ip_network(network)
        except ValueError as error:
            refuse(f"--trusted-proxies must be networks such as 10.0.0.0/8 or 192.0.2.1: {error}")
    _check_collector(settings)
    max_bytes, max_memory = settings["max-body-bytes"], settings["max-body-memory"]
    if max_bytes > max_memory // 5:
        refuse(
            f"--max-body-bytes {max_bytes} must be at most a fifth of --max-body-memory {max_memory}: one caller gets a"
            " quarter, and part of it is for small bodies"
        )


def _check_http(settings: Settings) -> None:
    """How HTTP is served, and the names that clients use."""
    has_certificate, has_key = (settings[name] is not None for name in ("ssl-certfile", "ssl-keyfile"))
    if has_certificate != has_key:
        refuse("--ssl-certfile and --ssl-keyfile go together")
    if settings["ssl-ca-certs"] is not None and not has_certificate:
        refuse("--ssl-ca-certs needs --ssl-certfile and --ssl-keyfile")
    if has_certificate and has_key:
        _check_certificate(settings["ssl-certfile"], settings["ssl-keyfile"], settings["ssl-ca-certs"])
    if (settings["ssl-cert-reqs"] > 0) != (settings["ssl-ca-certs"] is not None):
        refuse("--ssl-cert-reqs 1 or 2 and --ssl-ca-certs go together")
    path = settings["root-path"]
    if path and (not path.startswith("/") or path.endswith("/") or "//" in path or not path.isascii()):
        refuse(f"--root-path must be a path such as /llm, not {path!r}")
    if "" in settings["served-model-name"]:
        refuse(f"{settings.origins['served-model-name']} must not be empty")
    read_chat_template(settings)


def _check_certificate(certificate: str, key: str, authorities: str | None) -> None:
    """Read the files as the server will."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password=lambda: "")  # else OpenSSL asks at the terminal
    except OSError as error:
        reason = error.strerror or str(error)
        refuse(f"--ssl-certfile {certificate} and --ssl-keyfile {key} cannot be used: {reason}")
    try:
        if authorities is not None:
            context.load_verify_locations(authorities)
    except OSError as error:
        refuse(f"--ssl-ca-certs {authorities} cannot be used: {error.strerror or error}")


def _check_collector(settings: Settings) -> None:
    endpoint = settings["otlp-endpoint"]
    if endpoint is None:
        if "otlp-sample-ratio" in settings.origins:
            refuse(f"{settings.origins['otlp-sample-ratio']} needs --otlp-endpoint")
        return
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname or url.path not in ("", "/"):
        refuse(f"{settings.origins['otlp-endpoint']} must be a URL without a path, such as http://localhost:4317")


def _check_files(settings: Settings) -> None:
    for name, flag in FLAGS.items():
        exists = {"file": Path.is_file, "folder": Path.is_dir}.get(flag.must_exist)
        if exists and settings[name] is not None and not exists(Path(settings[name])):
            refuse(f"{settings.origins[name]} {settings[name]} does not exist")


def _shown(settings: Settings, name: str) -> str:
    value: Any = settings.shown()[name]
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(value) if isinstance(value, tuple) else str(value)


_MAX_TEMPLATE_BYTES = 1 << 20
_TEMPLATE_MARKS = ("{", "}", "\n")
"""A text with one of them is a template, not a path."""


def read_chat_template(settings: Settings) -> str | None:
    """The text of `--chat-template`, a file or the template itself; None for the model's own. Raises LauncherError."""
    template: str | None = settings["chat-template"]
    if template is None:
        return None
    origin = settings.origins["chat-template"]
    if settings["tokenizer-config-path"] is not None:
        refuse(f"{origin} and {settings.origins['tokenizer-config-path']} both give a chat template: give one")
    if any(mark in template for mark in _TEMPLATE_MARKS):
        return template
    try:
        content = Path(template).read_bytes()
        text = content.decode()
    except OSError as error:
        refuse(f"{origin} {template} cannot be read: {error.strerror}. A template itself contains {{ and }}")
    except UnicodeDecodeError:
        refuse(f"{origin} {template} is not a text in UTF-8")
    if not text or len(content) > _MAX_TEMPLATE_BYTES:
        refuse(f"{origin} {template} must have 1 to {_MAX_TEMPLATE_BYTES} bytes")
    return text


_LORA_MODULE_KEYS = {"name", "path", "base_model_name"}


@dataclass(frozen=True)
class LoraModule:
    """One adapter of `--lora-modules`, which has vLLM's form."""

    name: str
    ref: refs.Ref


def read_lora_modules(settings: Settings) -> list[LoraModule]:
    """Raises LauncherError."""
    origin, modules = settings.origins.get("lora-modules", ""), dict[str, LoraModule]()
    for text in settings["lora-modules"]:
        try:
            name, path = _name_and_path(text, settings)
            if name in modules:
                raise ValueError(f"{name!r} is given twice")
            modules[name] = LoraModule(name, _ref(path))
        except ValueError as error:
            refuse(f"{origin} {text}: {error}")
    return list(modules.values())


def _name_and_path(text: str, settings: Settings) -> tuple[str, str]:
    """Raises ValueError."""
    if text.startswith("{"):
        values: Any = json.loads(text)
        unknown = values.keys() - _LORA_MODULE_KEYS
        name, path, base = (values.get(key, "") for key in ("name", "path", "base_model_name"))
        if unknown or not all(isinstance(value, str) for value in (name, path, base)):
            raise ValueError("its keys are name, path and base_model_name, each with a text")
        names = (settings["model-id"], *settings["served-model-name"])
        if base and base not in names:
            raise ValueError(f"its base_model_name is {base!r}, and --model-id and --served-model-name have {names}")
    else:
        name, _, path = text.partition("=")
    if not name or not path:
        raise ValueError("it must look like name=path")
    refs.check_alias(name)
    if name in (settings["model-id"], *settings["served-model-name"]):
        raise ValueError(f"{name!r} is a name of the base model")
    return name, path


def _ref(path: str) -> refs.Ref:
    """A folder of this machine, a location in S3, or a hub id. Raises ValueError."""
    if Path(path).is_dir():
        return refs.Ref(refs.SourceKind.LOCAL, os.path.abspath(path))
    if path.startswith("s3://"):
        return refs.parse(path, refs.SourceKind.S3)
    try:
        return refs.parse(path, refs.SourceKind.HUB)
    except ValueError:
        raise ValueError(f"{path!r} is neither a folder that exists nor a hub id") from None


URL_VARIABLE = "REQUEST_LOGGER_URL"


@dataclass(frozen=True)
class UsageDestinations:
    """Where usage records of finished requests go."""

    log: str | None = None
    url: str | None = field(default=None, repr=False)
    """It may contain credentials."""


def usage_destinations(settings: Settings, environment: Mapping[str, str]) -> UsageDestinations:
    """The destinations of settings and environment. Raises LauncherError, whose text never contains the URL."""
    path, url = settings["usage-log"], environment.get(URL_VARIABLE) or None
    if settings["log-texts"] and path is None and url is None:
        refuse(f"{settings.origins['log-texts']} needs --usage-log or {URL_VARIABLE}: texts go to these only")
    if path is not None:
        path = os.path.abspath(path)
        if Path(path).is_dir() or not Path(path).parent.is_dir():
            refuse(f"{settings.origins['usage-log']} {path} is not a file in an existing folder")
    if url is not None and not _is_url(url):
        refuse(f"{URL_VARIABLE} is not an http:// or https:// URL")
    return UsageDestinations(path, url)


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:
        return False
