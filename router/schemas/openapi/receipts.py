"""Pydantic models of receipts, for the document at `/openapi.json` only."""

from typing import Any, Literal

from pydantic import BaseModel, Field

FinishReason = Literal["length", "eos_token", "stop_sequence"]


class ReceiptTokens(BaseModel):
    num_tokens: int
    sha256: str = Field(description="Of the ids as little-endian 32-bit integers")
    token_ids: list[int] | None = Field(None, description="In answers; not in the operator's file")


class ReceiptOutput(ReceiptTokens):
    finish_reason: FinishReason


class Receipt(BaseModel):
    """What is needed to reproduce a text; see docs/receipts.md."""

    receipt: Literal[1] = Field(description="Version of the format")
    created: int
    request_id: str
    version: str
    model_id: str
    base_digest: str = Field(description="Of the files of configuration and weights")
    tokenizer_digest: str
    dtype: str
    quantization: str | None = Field(description="Quantization of the base, as in `--quantize`")
    num_ranks: int = Field(description="Tensor-parallel ranks, each of which rounds its own sums")
    kv_cache_dtype: str | None = Field(description="Null for the dtype of the model")
    device: str
    max_total_tokens: int
    adapter: dict[str, Any] | None = Field(description="Named as in requests, with the digest of its content")
    speculation: dict[str, Any]
    parameters: dict[str, Any] = Field(description="Seed, length, stop strings and all sampling parameters")
    prompt: ReceiptTokens
    output: ReceiptOutput
