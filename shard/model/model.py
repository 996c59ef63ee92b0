"""The model as the engine sees it: fill `inputs`, call `forward`, get one row of logits per wanted token.

Runs transformers' own code on one flat row of T tokens; KV lives in pages that the attention backend owns.
"""

from dataclasses import dataclass

import torch
from torch import nn

from shard.attention import AttentionBackend
from shard.batch import Segment, StepInputs
from shard.model.site import AttentionSite


@dataclass(frozen=True)
class ModelInfo:
    """What others may know about a loaded model."""

    model_type: str
    vocab_size: int
    """Rows of the output head."""
    max_positions: int | None
    dtype: torch.dtype
    device: torch.device
    num_layers: int
    num_parameters: int


class Model:
    """A loaded base model with paged KV."""

    def __init__(self, network: nn.Module, backend: AttentionBackend, info: ModelInfo) -> None:
        self.network = network
        self.backend = backend
        self.info = info
        self.page_size = backend.page_size
        self.inputs = StepInputs(backend.page_size, info.device)
        self.sites = [module for module in network.modules() if isinstance(module, AttentionSite)]
        self._learn_shapes()

    @property
    def page_bytes(self) -> int:
        """Bytes of K and V per page, over all layers."""
        widths = (
            site.spec.num_kv_heads * (site.spec.key_dim + site.spec.value_dim) for site in self.sites if site.spec
        )
        return sum(widths) * self.page_size * self.info.dtype.itemsize

    def allocate_kv(self, num_pages: int) -> None:
        """Reserve KV memory for `num_pages` pages in every layer, dropping what was there."""
        for site in self.sites:
            assert site.spec is not None
            site.kv = None
            site.kv = self.backend.allocate(site.spec, num_pages, self.info.dtype, self.info.device)

    @torch.inference_mode()
    def forward(self) -> torch.Tensor:
        """Logits of `inputs.logits_rows`: [S, V] float32."""
        self.backend.prepare(self.inputs)
        output = self.network(
            input_ids=self.inputs.input_ids[None],
            position_ids=self.inputs.position_ids[None],
            use_cache=False,
            logits_to_keep=self.inputs.logits_rows,
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def _learn_shapes(self) -> None:
        """Run two tokens without KV, so that every site learns its layer's shape; a site never called is dropped."""
        row = torch.zeros(2, dtype=torch.long, device=self.info.device)
        self.inputs.fill([Segment(0, 2, range(1))], row, row[:1])
        self.forward()
        self.sites = [site for site in self.sites if site.spec is not None]
        if any(site.num_calls != 1 for site in self.sites) or len(self.sites) != self.info.num_layers:
            raise ValueError(f"{self.info.model_type}: its layers do not call one attention function once each")
