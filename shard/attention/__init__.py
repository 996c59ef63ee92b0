"""Attention over paged K and V behind one narrow interface. `create` picks a backend by name and device."""

from shard.attention.base import AttentionBackend, AttentionSpec, LayerKV
from shard.attention.reference import ReferenceAttention

__all__ = ["AttentionBackend", "AttentionSpec", "LayerKV", "create"]


def create(name: str, device_type: str, page_size: int | None) -> AttentionBackend:
    """The backend called `name`; `auto` picks by device. Raises ValueError for names that do not exist."""
    if name in ("auto", "reference"):
        return ReferenceAttention(page_size or 16)
    raise ValueError(f"unknown attention backend {name!r}; known: auto, reference")
