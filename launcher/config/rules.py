"""Which settings go together, which are refused, and which change nothing here: checked before anything is started."""

import importlib.util
from pathlib import Path
from typing import Any

from lorikeet.adapters import refs
from lorikeet.launcher.config.flags import FLAGS
from lorikeet.launcher.config.settings import Settings
from lorikeet.launcher.exits import Exit, LauncherError
from lorikeet.proto import quantization

OF_ROUTERS = frozenset({
    "adapter-disk-cache", "adapter-id", "adapter-source", "adapters", "admin-key-file", "api-keys",
    "auth-cache-ttl-s", "auth-stale-s", "cors-allow-credentials", "cors-allow-header", "cors-allow-method",
    "cors-allow-origin", "cors-expose-header", "default-adapter-source", "hostname", "local-adapter-root",
    "log-texts", "lorax-use-global-hf-token", "max-adapter-size", "max-best-of", "max-body-bytes",
    "max-concurrent-requests", "max-queue-seconds", "max-queued-per-adapter", "max-stop-sequences", "port",
    "preloaded-adapter-ids", "preloaded-adapter-source", "receipts", "recovery-timeout-s", "request-timeout-s",
    "speculative-method", "speculative-schedule", "speculative-tokens", "speculative-tokens-max", "strict-adapters",
    "tokenizer-config-path", "usage-log", "validation-workers", "verify",
})  # fmt: skip
"""Flags that change nothing where there is no router."""
OF_SHARDS = frozenset({
    "adapter-cycle-time-s", "adapter-host-memory", "adapter-memory-fraction", "chunked-prefill", "compile",
    "compile-max-batch-size", "cpu-memory", "cuda-memory-fraction", "disable-custom-kernels", "draft-dtype",
    "draft-quantize", "eager", "kv-cache-dtype", "master-addr", "master-port", "max-active-adapters",
    "max-batch-prefill-tokens", "max-batch-total-tokens", "memory-wiggle-room", "ngram-long", "ngram-max", "ngram-min",
    "num-shard", "prefix-caching", "quantize", "sharded", "speculation-max-batch-size", "threads", "watermark-delta",
    "watermark-gamma",
})  # fmt: skip
"""Flags that change nothing where no shard is started."""
_WITHOUT_A_DRAFT = ("auto", "lookup", "ngram", "medusa", "off")


def check(settings: Settings) -> None:
    """Raise LauncherError with one sentence for the first thing that can't be served."""
    for name, flag in FLAGS.items():
        if flag.refused and name in settings.given and settings[name] not in flag.harmless:
            _refuse(f"{settings.given[name]} {_shown(settings, name)} is refused: {flag.refused}")
    _check_pairs(settings)
    _check_adapters(settings)
    _check_speculation(settings)
    _check_quantization(settings)
    _check_files(settings)


def check_lengths(settings: Settings) -> None:
    """The same for lengths, once those that the model decides about are known."""
    longest, total = settings["max-input-length"], settings["max-total-tokens"]
    if longest >= total:
        _refuse(f"--max-input-length {longest} must be less than --max-total-tokens {total}: output needs room too")
    step = settings["max-batch-prefill-tokens"]
    if not settings["chunked-prefill"] and step < longest:
        _refuse(
            f"--max-batch-prefill-tokens {step} must be at least --max-input-length {longest} "
            "while --chunked-prefill is false"
        )
    everything = settings["max-batch-total-tokens"]
    if everything is not None and total > everything:
        _refuse(f"--max-total-tokens {total} must be at most --max-batch-total-tokens {everything}")


def check_models(settings: Settings, base: dict[str, Any], draft: dict[str, Any] | None) -> None:
    """The same for what the models' configurations say of their weights."""
    if settings["shard-address"]:
        return
    told = {"quantize": ("the model", base)} | ({} if draft is None else {"draft-quantize": ("the draft model", draft)})
    for name, (model, config) in told.items():
        try:
            quantization.choose(settings[name], config)
        except ValueError as reason:
            _refuse(f"{model} cannot be served: {reason}")


def without_effect(settings: Settings, device: str, num_ranks: int = 1) -> list[str]:
    """One sentence for each flag that somebody gave and that changes nothing on `device`, or on so many."""
    sentences = []
    for name, flag in FLAGS.items():
        here = not flag.no_effect_on or device.startswith(flag.no_effect_on)
        if flag.no_effect and here and name in settings.given:
            sentences.append(f"{settings.given[name]} has no effect: {flag.no_effect}")
    elsewhere: dict[str, str] = {}
    if num_ranks == 1:
        elsewhere = dict.fromkeys(("master-addr", "master-port"), "the model is not split, so nobody meets there")
    else:
        elsewhere["disable-custom-kernels"] = "of a model that is split nothing is fused anyway"
    if settings["shard-listen"] is not None:
        elsewhere |= dict.fromkeys(OF_ROUTERS, "with --shard-listen there is no router here, whose matter it is")
    elif settings["shard-address"]:
        elsewhere |= dict.fromkeys(OF_SHARDS, "with --shard-address no shard is started here, whose matter it is")
    given = [name for name in FLAGS if name in elsewhere and name in settings.given]
    return sentences + [f"{settings.given[name]} has no effect: {elsewhere[name]}" for name in given]


def _check_adapters(settings: Settings) -> None:
    for name in ("adapter-source", "default-adapter-source", "preloaded-adapter-source"):
        if settings[name] == "pbase":
            _refuse(f"{settings.given[name]} pbase is refused: Predibase's service is closed to other servers")
    preloaded = settings["preloaded-adapter-source"] or settings["adapter-source"]
    names = [("adapter-id", name, settings["adapter-source"]) for name in filter(None, [settings["adapter-id"]])]
    names += [("preloaded-adapter-ids", name, preloaded) for name in settings["preloaded-adapter-ids"]]
    for flag, name, source in names:
        try:
            refs.parse(name, refs.Source(source))
        except ValueError as error:
            _refuse(f"{settings.given[flag]}: {error}")


def _check_pairs(settings: Settings) -> None:
    model = settings["model-id"]
    if settings["compile"] and settings["eager"]:
        _refuse("--compile and --eager contradict each other")
    if settings["revision"] is not None:
        if model is None:
            _refuse("--revision needs --model-id: the embedded model has no revisions")
        _check_revision(settings, "model-id", "revision")
    if settings["weights-cache-override"] is not None and model is None:
        _refuse("--weights-cache-override needs --model-id: the embedded model has its weights beside it")
    _check_ranks(settings)
    _check_shards(settings)
    _check_ray(settings)
    device = settings["device"]
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (":" in device and not (kind == "cuda" and number.isdecimal())):
        _refuse(f"--device must be auto, cpu, cuda or cuda:N, not {device!r}")


def _check_ranks(settings: Settings) -> None:
    """Whether the model is split over several devices."""
    sharded, num_shard = settings["sharded"], settings["num-shard"]
    if num_shard is not None and sharded is not None and sharded != (num_shard > 1):
        _refuse(f"--sharded {str(sharded).lower()} and --num-shard {num_shard} contradict each other")


def _check_shards(settings: Settings) -> None:
    """Where shards are, and what opens them."""
    elsewhere, listen = settings["shard-address"], settings["shard-listen"]
    for address in (*elsewhere, *filter(None, [listen])):
        if not address.startswith("file:/") and not _is_address(address.removeprefix("dns:")):
            _refuse(f"an address of a shard must look like 127.0.0.1:50051, not {address!r}")
    if elsewhere and listen is not None:
        _refuse("--shard-listen starts a shard, and --shard-address says that shards run elsewhere: give one")
    for name in ("shard-address", "shard-listen"):
        if settings[name] and settings["replicas"] > 1:
            _refuse(f"--{name} and --replicas {settings['replicas']} contradict each other: replicas are started here")
    is_remote = bool(elsewhere) or listen is not None
    for name in ("shard-secret-file", "shard-tls-cert", "shard-tls-key", "shard-tls-ca"):
        if settings[name] is not None and not (is_remote or settings["engine"] == "ray"):
            _refuse(f"--{name} needs --shard-address, --shard-listen or --engine ray: there is no shard on TCP")
    if (settings["shard-tls-cert"] is None) != (settings["shard-tls-key"] is None):
        _refuse("--shard-tls-cert and --shard-tls-key go together")
    if elsewhere and settings["shard-tls-cert"] is not None and settings["shard-tls-ca"] is None:
        _refuse("--shard-tls-cert needs --shard-tls-ca where shards run elsewhere: by what are theirs judged?")
    has_authority = settings["shard-tls-cert"] is not None and settings["shard-tls-ca"] is not None
    if listen is not None and settings["shard-secret-file"] is None and not has_authority:
        _refuse(
            f"whoever reaches {listen} could use the shard: --shard-listen needs --shard-secret-file, or"
            " --shard-tls-cert, --shard-tls-key and --shard-tls-ca"
        )


def _check_ray(settings: Settings) -> None:
    """What Ray decides nobody else can."""
    if settings["engine"] != "ray":
        return
    if importlib.util.find_spec("ray") is None:
        _refuse("--engine ray needs Ray: pip install 'lorikeet-serve[ray]'")
    for name in ("shard-address", "shard-listen"):
        if settings[name]:
            _refuse(f"{settings.given[name]} and --engine ray contradict each other: Ray says where shards are")
    for name in ("shard-tls-cert", "shard-tls-key", "shard-tls-ca"):
        if settings[name] is not None:
            _refuse(f"{settings.given[name]} is refused with --engine ray: no certificate names nodes yet to be chosen")
    if settings["device"] not in ("cpu", "cuda"):
        _refuse("--engine ray needs --device cpu or cuda: what this machine has says nothing of Ray's nodes")


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(colon and host) and port.isdecimal() and 0 < int(port) < 65536


def _check_revision(settings: Settings, name: str, revision: str) -> None:
    model = settings[name]
    if settings[revision] is not None:
        if Path(model).is_dir():
            _refuse(f"--{revision} goes with a hub id, and {model} is a folder")
        if "@" in model:
            _refuse(f"--{revision} and the revision in --{name} {model} are two: give one")


def _check_speculation(settings: Settings) -> None:
    shortest, longest = settings["ngram-min"], settings["ngram-max"]
    if shortest > longest:
        _refuse(f"--ngram-min {shortest} must be at most --ngram-max {longest}")
    draft = settings["draft-model-id"]
    if draft is None:
        for name in ("draft-revision", "draft-tokenizer-id", "draft-dtype", "draft-quantize"):
            if settings[name] is not None:
                _refuse(f"{settings.given[name]} needs --draft-model-id")
        for name, harmless in (("speculative-method", _WITHOUT_A_DRAFT), ("verify", ("coupled",))):
            if settings[name] not in harmless:
                _refuse(f"{settings.given[name]} {settings[name]} needs --draft-model-id")
    else:
        _check_revision(settings, "draft-model-id", "draft-revision")
    wanted, most = settings["speculative-tokens"] or 0, settings["speculative-tokens-max"]
    if wanted > most:
        _refuse(f"--speculative-tokens {wanted} must be at most --speculative-tokens-max {most}")


def _check_quantization(settings: Settings) -> None:
    for name in ("quantize", "draft-quantize"):
        method = settings[name]
        if name == "draft-quantize" and method == quantization.FP8_KV:
            _refuse(f"{settings.given[name]} {method} is refused: --kv-cache-dtype fp8 is for both models' KV")
        if method is not None and not settings["shard-address"] and (reason := quantization.reason_against(method)):
            _refuse(f"{settings.given[name]} {method} is refused: {reason}")


def _check_files(settings: Settings) -> None:
    named = {"tokenizer-config-path": Path.is_file, "weights-cache-override": Path.is_dir}
    named |= {"adapters": Path.is_file, "api-keys": Path.is_file, "shard-secret-file": Path.is_file}
    named |= dict.fromkeys(("shard-tls-cert", "shard-tls-key", "shard-tls-ca"), Path.is_file)
    for name, is_there in named.items():
        path = settings[name]
        if path is not None and not is_there(Path(path)):
            _refuse(f"{settings.given[name]} {path} does not exist")


def _shown(settings: Settings, name: str) -> str:
    value: Any = settings.shown()[name]
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _refuse(sentence: str) -> None:
    raise LauncherError(Exit.ARGUMENT_VALIDATION, sentence)
