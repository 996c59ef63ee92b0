"""K and V in whole pages, as the kernels on CUDA read them: torch's and our own."""

import torch

from lorikeet.shard.attention.base import AttentionSpec, LayerKV


class PagedKV(LayerKV):
    """A page's tokens one after another, a token's heads side by side."""

    def __init__(
        self,
        spec: AttentionSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        on: torch.device,
        has_scales: bool = False,
    ) -> None:
        shape = (num_pages, page_size, spec.num_kv_heads)
        # [N, P, num_kv_heads, key_dim]
        self.keys = torch.zeros(*shape, spec.key_dim, dtype=dtype, device=on)
        # [N, P, num_kv_heads, value_dim]
        self.values = torch.zeros(*shape, spec.value_dim, dtype=dtype, device=on)
        # [N, P, num_kv_heads] float32 that a token's head is multiplied by, where it is kept in eight bits
        self.key_scales = torch.ones(shape, device=on) if has_scales else None
        self.value_scales = torch.ones(shape, device=on) if has_scales else None
        # [num_heads] float32, as the kernels read them
        self.sinks = None if spec.sinks is None else spec.sinks.detach().to(on, torch.float32).contiguous()
        self.slopes = None if spec.alibi_slopes is None else spec.alibi_slopes.to(on, torch.float32).contiguous()
