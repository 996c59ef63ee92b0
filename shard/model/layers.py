"""The pass over a loaded network that puts our parts in place of transformers'."""

from torch import nn

from shard.attention import AttentionBackend
from shard.model.site import AttentionSite


def bind(network: nn.Module, backend: AttentionBackend) -> None:
    """Give every attention module its site."""
    for module in list(network.modules()):
        if isinstance(getattr(module, "layer_idx", None), int):
            module.lorikeet_site = AttentionSite(backend)
