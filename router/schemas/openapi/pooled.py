"""Bodies and answers of the routes to embedding and classification models."""

from typing import Literal

from pydantic import BaseModel, Field

Input = str | list[str] | list[int] | list[list[int]]


class PooledFields(BaseModel):
    """What all bodies have but LoRAX's."""

    model: str | None = Field(None, description="The base model, an adapter or an alias")
    adapter_id: str | None = None
    adapter_source: str | None = None
    api_token: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, description="-1: as many as a text may have")
    truncation_side: Literal["left", "right"] | None = None
    truncate: bool | None = Field(None, description="The same as `truncate_prompt_tokens` -1")
    priority: int | None = None
    user: str | None = None


class InputFields(PooledFields):
    """A text, texts, or their token ids."""

    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    prompt_name: str | None = Field(None, description="One of the prompts of sentence-transformers")
    use_activation: bool | None = Field(None, description="False gives logits instead of scores")


class EmbeddingsRequest(InputFields):
    """Body of `/v1/embeddings`."""


class CohereEmbedRequest(BaseModel):
    """Body of `/v2/embed`."""

    model: str = Field(description="The base model, an adapter or an alias")
    texts: list[str] | None = None
    inputs: list[dict[str, object]] | None = Field(None, description="Objects with `content`: a list of texts")
    input_type: str | None = Field(None, description="Chooses one of the model's prompts")
    embedding_types: list[Literal["float", "binary", "ubinary", "base64"]] | None = None
    output_dimension: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    truncate: Literal["NONE", "START", "END"] | None = None
    adapter_id: str | None = None
    adapter_source: str | None = None
    api_token: str | None = None
    priority: int | None = None


class PoolingRequest(InputFields):
    """Body of `/pooling`."""

    task: str | None = Field(None, description="The model's; or token_embed, token_classify: a result for every token")


class EmbedRequest(BaseModel):
    """Body of LoRAX's `/embed`."""

    inputs: str
    parameters: dict[str, object] | None = None


class ClassifyRequest(BaseModel):
    """Body of `/classify`: LoRAX's with `inputs`, vLLM's with `input`."""

    inputs: str | None = None
    input: Input | None = None


class ClassifyBatchRequest(BaseModel):
    """Body of LoRAX's `/classify_batch`."""

    inputs: list[str]


class ScoreRequest(PooledFields):
    """Body of `/score`."""

    text_1: str | list[str]
    text_2: str | list[str]


class RerankRequest(PooledFields):
    """Body of `/rerank`."""

    query: str
    documents: list[str]
    top_n: int | None = None


class PromptUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsResponse(BaseModel):
    """OpenAI's `data`, and the same as LoRAX's `embeddings`."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PromptUsage
    embeddings: list[Embedding]


class CohereEmbeddings(BaseModel):
    """Vectors in each type that was asked for."""

    float_: list[list[float]] | None = Field(None, alias="float")
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None
    base64: list[str] | None = None


class CohereApiVersion(BaseModel):
    version: str


class CohereTokens(BaseModel):
    input_tokens: int


class CohereMeta(BaseModel):
    api_version: CohereApiVersion
    billed_units: CohereTokens
    tokens: CohereTokens


class CohereEmbedResponse(BaseModel):
    """Answer of `/v2/embed`."""

    id: str
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: CohereMeta
    response_type: Literal["embeddings_by_type"]


class EmbedResponse(BaseModel):
    embeddings: list[float]


class Pooled(BaseModel):
    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str


class PoolingResponse(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Pooled]
    usage: PromptUsage


class Score(BaseModel):
    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage


class Document(BaseModel):
    text: str


class Ranked(BaseModel):
    index: int
    document: Document
    relevance_score: float


class RerankResponse(BaseModel):
    id: str
    created: int
    model: str
    usage: PromptUsage
    results: list[Ranked]
