"""The content of a receipt: everything that determines the tokens of one finished text, and those tokens.

A receipt for the client holds prompt and output as token ids; one for the operator's file holds their hashes.
"""

import time
from dataclasses import dataclass
from typing import Any

from lorikeet.proto import digest
from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.params import Speculation
from lorikeet.proto.version import version
from lorikeet.router.errors import UnsupportedField
from lorikeet.router.requests.adapter_ref import Adapter
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.types import GenerationRequest

FORMAT = 1
"""Version of the format; it changes when the meaning of a field does."""


@dataclass(frozen=True)
class Served:
    """Properties of the server that determine tokens, or help to find out why they differ."""

    model_id: str
    tokenizer_digest: str
    max_total_tokens: int
    info: pb.ShardInfo
    """Information on the shard that computed the text."""


def check_receipt(wanted: bool, speculation: Speculation, num_texts: int) -> None:
    """Raises UnsupportedField where a request that asks for a receipt cannot have one."""
    if not wanted:
        return
    if num_texts != 1:
        raise UnsupportedField("receipt", f"covers one text: this request asks for {num_texts}")
    if speculation.verify == "rejection":
        raise UnsupportedField(
            "receipt",
            "needs a reproducible text, and `rejection` preserves only its distribution: "
            "set `speculative_verification` to shared-noise, or a `seed`",
        )


def may_have_receipt(request: GenerationRequest) -> bool:
    """Whether a receipt determines the text, and the text is a client's."""
    return request.speculation.verify != "rejection" and not request.is_probe


def make_receipt(generation: Generation, served: Served) -> dict[str, Any]:
    """Receipt of a finished text, without its tokens; the caller adds the digest of the base's files."""
    request, finish, info = generation.request, generation.finish_reason, served.info
    heads = generation.adapters.heads_pin
    assert finish is not None
    return {
        "receipt": FORMAT,
        "created": int(time.time()),
        "request_id": request.request_id,
        "version": version(),
        "model_id": served.model_id,
        "base_digest": "",
        "tokenizer_digest": served.tokenizer_digest,
        "dtype": info.dtype.removeprefix("torch."),
        "quantization": info.quantization or None,
        "num_ranks": info.num_ranks or 1,
        "kv_cache_dtype": info.kv_cache_dtype or None,
        "device": info.device.partition(":")[0],
        "max_total_tokens": served.max_total_tokens,
        "adapter": None if request.adapter is None else _adapter(request.adapter, generation.digest),
        # Informational: speculation does not change the text.
        "speculation": {"method": request.speculation.method, "heads_digest": None if heads is None else heads[1]},
        "parameters": _parameters(request, info) | _end_of(generation),
        "prompt": {"num_tokens": len(request.prompt_ids), "sha256": digest.of_tokens(request.prompt_ids)},
        "output": {
            "num_tokens": len(generation.emitted_ids),
            "sha256": digest.of_tokens(generation.emitted_ids),
            "finish_reason": finish.value,
        },
    }


def add_tokens(receipt: dict[str, Any], generation: Generation) -> dict[str, Any]:
    """With the token ids of prompt and output, for the client."""
    prompt = {**receipt["prompt"], "token_ids": generation.request.prompt_ids}
    return {**receipt, "prompt": prompt, "output": {**receipt["output"], "token_ids": generation.emitted_ids}}


def _adapter(adapter: Adapter, digest: str) -> dict[str, Any]:
    """As a request names it, and its digest. An alias needs no source."""
    sources = {pin.source.value for pin in adapter.pins}
    fields: dict[str, Any] = {
        "id": adapter.name,
        "source": sources.pop() if len(sources) == 1 and not adapter.alias else None,
        "digest": digest,
    }
    merging = adapter.merging
    if merging is not None:
        fields["merged"] = {
            "ids": adapter.name.split(","),
            "weights": merging.weights,
            "merge_strategy": merging.strategy,
            "density": merging.density,
            "majority_sign_method": merging.majority_sign_method,
        }
    return fields


def _end_of(generation: Generation) -> dict[str, Any]:
    """How an output with reasoning ends: stop strings count after that only, which no parameter of a prompt says."""
    request = generation.request
    if request.reasoning is None or not any(request.stop_strings):
        return {}
    has_stopped = generation.stop_reason in request.stop_strings
    return {"stop": (), "max_new_tokens": generation.num_generated if has_stopped else request.max_new_tokens}


def _parameters(request: GenerationRequest, info: pb.ShardInfo) -> dict[str, Any]:
    sampling = request.sampling
    watermark = {"gamma": info.watermark_gamma, "delta": info.watermark_delta}
    return {
        "seed": sampling.seed,
        "max_new_tokens": request.max_new_tokens,
        "stop": request.stop_strings,
        "ignore_eos": request.ignore_eos,
        "do_sample": sampling.do_sample,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "logit_bias": sampling.logit_bias,
        "min_tokens": sampling.min_tokens,
        "stop_token_ids": request.stop_token_ids,
        "allowed_token_ids": sampling.allowed_ids,
        "bad_words": request.bad_words,
        "skip_special_tokens": request.skip_special_tokens,
        "grammar": {"kind": request.grammar_kind, "value": request.grammar_value} if request.grammar_kind else None,
        "watermark": watermark if sampling.watermark else None,
    }
