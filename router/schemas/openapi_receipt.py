"""The schema of receipts that clients read: for `/openapi.json` alone, as published.py."""

from typing import Any, Literal

from pydantic import BaseModel, Field


class ReceiptTokens(BaseModel):
    num_tokens: int
    sha256: str = Field(description="Of the ids as little-endian 32 bit numbers")
    token_ids: list[int] | None = Field(None, description="In answers; not in the operator's file")


class ReceiptOutput(ReceiptTokens):
    finish_reason: Literal["length", "eos_token", "stop_sequence"]


class Receipt(BaseModel):
    """What a text follows from; see docs/receipts.md."""

    receipt: Literal[1] = Field(description="The form of receipts")
    created: int
    request_id: str
    version: str
    model_id: str
    base_digest: str = Field(description="Of the configuration's and weights' files")
    tokenizer_digest: str
    dtype: str
    quantization: str | None = Field(description="What the base's weights are quantised by, as in `--quantize`")
    num_ranks: int = Field(description="Processes that the model is split over, each of which rounds its own sums")
    kv_cache_dtype: str | None = Field(description="What K and V are kept in, null for the number format of the model")
    device: str
    max_total_tokens: int
    adapter: dict[str, Any] | None = Field(description="As a request names it, and the digest of its content")
    speculation: dict[str, Any]
    parameters: dict[str, Any] = Field(description="Seed, length, stop strings and everything that tokens are drawn by")
    prompt: ReceiptTokens
    output: ReceiptOutput
