"""The configuration of a shard process: one frozen dataclass, read from the JSON file that the launcher writes.

Holds names and defaults only; nothing here opens a model or a socket.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class ShardConfig:
    """All settings of a shard. None for "auto" is resolved by the code that measures what the value depends on."""

    model_id: str
    """Name of the model as given to `--model-id`, shown to users."""
    model_path: str
    """Local folder with the configuration and weights."""
    listen: str
    """gRPC address: `unix:/private/folder/shard-0.sock` or `host:port`."""
    secret_path: str | None = None
    """File with the secret that routers must present, on TCP."""
    tls_cert_path: str | None = None
    """This shard's TLS certificate …"""
    tls_key_path: str | None = None
    """… and its key; None serves TCP without TLS."""
    tls_ca_path: str | None = None
    """Certificate authority that must have signed the routers' certificates; None requires no certificate."""
    ready_file: str | None = None
    """File that is created when the shard accepts requests; None creates none."""
    device: str = "cpu"
    """`cpu` or `cuda:N`."""
    num_ranks: int = 1
    """Processes that the model is split over, on CUDA one per device, from `device` on."""
    master_addr: str = "localhost"
    """Address at which the ranks meet …"""
    master_port: int = 0
    """… and its port; 0 is any free port."""
    dtype: str | None = None
    """`float32`, `bfloat16` or `float16`; None is the checkpoint's (float32 for float16 on CPU)."""
    quantize: str | None = None
    """Quantization method of the weights, as in `--quantize`; None is the checkpoint's own, if any."""
    trust_remote_code: bool = False
    max_total_tokens: int = 4096
    """Prompt plus output of one request, in tokens."""
    step_tokens: int = 4096
    """Maximum of prompt tokens per step (`--max-batch-prefill-tokens`)."""
    max_batch_total_tokens: int | None = None
    """Maximum of KV tokens over all requests; None is limited by memory only."""
    max_running: int = 256
    """Maximum of requests that run at once."""
    max_waiting: int = 64
    """Submitted requests that may wait for pages beyond the running ones; bounds the credit."""
    chunked_prefill: bool = True
    prefix_caching: bool = True
    cpu_memory: int | None = None
    """Bytes for KV and adapters on CPU; None is a part of the free memory."""
    cuda_memory_fraction: float = 1.0
    memory_wiggle_room: float = 0.9
    """Fraction of the memory left after loading that KV may use."""
    num_pages: int | None = None
    """Fixes the number of KV pages; None sizes them from memory."""
    page_size: int | None = None
    """Tokens per KV page; None is the attention backend's own."""
    attention: str = "auto"
    """Attention backend: `auto`, `reference`, `cpu`, …"""
    fusions: str = "auto"
    """`auto` computes chains of small operators by our fused kernels, `none` one by one by torch; `device` uses the
    kernels for CUDA on any device, for tests."""
    kv_cache_dtype: str = "auto"
    """Format of K and V in pages: `auto` is the model's dtype; or `fp8`."""
    commit_lag: int | None = None
    """0 commits a step before the next is launched, 1 after; None is 0 on CPU, 1 on CUDA."""
    graphs: bool | None = None
    """Whether steps run as CUDA graphs; None uses them if possible and logs a warning if not."""
    graph_rows: int = 256
    """Maximum of tokens of a step that runs as a graph."""
    threads: int | None = None
    """Torch's intra-op threads; None is the number of cores that this process may use."""
    adapter_store: str | None = None
    """Folder of adapters in the served layout, by digest; None serves no adapters."""
    max_active_adapters: int = 1024
    """Maximum of adapters in slots."""
    adapter_memory_fraction: float = 0.1
    """Fraction of the device's memory (on CPU: of `cpu_memory`) that slots may use."""
    adapter_host_memory: int | None = None
    """Bytes of host memory for adapters; None is four times the memory of slots. On CPU both are the same."""
    adapter_cycle_time_s: float = 2.0
    """Time that an adapter may wait for a slot before an adapter in use is evicted."""
    speculation_max_batch_size: int = 32
    """Speculation is disabled while more requests than this are running."""
    ngram_min: int = 1
    """Minimum length of the n-gram that prompt lookup matches …"""
    ngram_max: int = 8
    """… and its maximum length."""
    ngram_long: int = 4
    """Length of a match from which prompt lookup has priority over heads and draft model."""
    draft_model: str | None = None
    """Local folder of the draft model; None serves without one."""
    draft_model_id: str = ""
    """Name of the draft model as given to `--draft-model-id`."""
    draft_dtype: str | None = None
    """`dtype` of the draft model."""
    draft_quantize: str | None = None
    """`quantize` of the draft model."""
    step_timeout_s: float = 120.0
    """A step that takes longer ends the process; 0 disables this."""
    served_file: str | None = None
    """File that is created when the first request has completed; None creates none."""
    watermark_gamma: float = 0.5
    watermark_delta: float = 2.0
    json_output: bool = False
    log_level: str = "info"
    parent_pid: int | None = None
    """The shard ends when this process has ended."""

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read the JSON file at `path`. Raises ValueError that names unknown fields."""
        values = json.loads(Path(path).read_text())
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"unknown shard configuration fields: {', '.join(unknown)}")
        return cls(**values)
