"""The bodies of the routes that administer adapters."""

from pydantic import Field

from lorikeet.router.schemas.adapters import AdapterSource
from lorikeet.router.schemas.model import Body


class AdapterName(Body):
    """An adapter, named as in requests."""

    adapter_id: str
    adapter_source: AdapterSource | None = None


class AdapterUnload(AdapterName):
    """The body of `/admin/adapters/unload`."""

    disk: bool = Field(False, description="Also deletes its file in the store")


class AdapterRefresh(Body):
    """The body of `/admin/adapters/refresh`."""

    adapter_id: str | None = Field(None, description="Default: all")
    adapter_source: AdapterSource | None = None


class LoadLora(Body):
    """vLLM's body of `/v1/load_lora_adapter`."""

    lora_name: str = ""
    lora_path: str = Field("", description="A folder, or an id as in requests")
    load_inplace: bool = False


class UnloadLora(Body):
    """vLLM's body of `/v1/unload_lora_adapter`."""

    lora_name: str = ""


class SageMakerAdapter(Body):
    """SageMaker's body of `/adapters`."""

    name: str = ""
    src: str = Field("", description="A folder, or an id as in requests")
    load_inplace: bool = False
