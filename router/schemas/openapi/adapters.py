"""Pydantic models of the routes that list models and administer adapters, for the document at `/openapi.json` only."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from lorikeet.router.schemas.openapi.models import AdapterSource


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str | None = Field(None, description="Of an adapter: its id at its source")
    parent: str | None = Field(None, description="Of an adapter: the base model")
    adapter_source: str | None = None
    problem: str | None = Field(None, description="Why a listed adapter is not served")
    tier: Literal["device", "host", "disk"] | None = Field(
        None, description="Where its content is: in a slot of a shard, in a shard's memory, or on disk"
    )


class AdapterName(BaseModel):
    adapter_id: str
    adapter_source: AdapterSource | None = None


class AdapterUnload(AdapterName):
    disk: bool | None = Field(False, description="Also deletes its file in the store")


class AdapterRefresh(BaseModel):
    adapter_id: str | None = Field(None, description="Default: all")
    adapter_source: AdapterSource | None = None


class LoadLora(BaseModel):
    lora_name: str
    lora_path: str
    load_inplace: bool | None = False


class UnloadLora(BaseModel):
    lora_name: str


class SageMakerAdapter(BaseModel):
    name: str
    src: str = Field(description="A folder, or an id as in requests")
    load_inplace: bool | None = False


class DeletedModel(BaseModel):
    id: str
    object: Literal["model"]
    deleted: bool


class AdapterList(BaseModel):
    named: list[dict[str, Any]]
    loaded: list[dict[str, Any]]


class Reloaded(BaseModel):
    num_entries: int
    num_changed: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]
