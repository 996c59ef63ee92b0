"""Pydantic models of what requests and answers of OpenAI's routes say about the request as a whole."""

from typing import Literal

from pydantic import BaseModel, Field


class StreamOptions(BaseModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = Field(False, description="Counts of tokens in every event")


class ReportedRequest(BaseModel):
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = Field(None, description="Up to 16 texts, which the answer repeats")
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None


class SpeculativeDecoding(BaseModel):
    """vLLM's."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int] = Field(description="Steps by the number of accepted draft tokens")
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_steps: int
    num_spec_tokens: int
    per_step_accepted: None
    per_step_drafted: None


class RequestMetrics(BaseModel):
    speculative_decoding: SpeculativeDecoding


class ReportedAnswer(BaseModel):
    metrics: RequestMetrics | None = Field(None, description="Of one sequence with draft tokens")
    metadata: dict[str, str] | None = None
    service_tier: Literal["default"] | None = Field(None, description="If the request has one")
