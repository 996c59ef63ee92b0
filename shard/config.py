"""What a shard process is told at start: one frozen dataclass, read from the JSON file that the launcher wrote.

Knows names and defaults only; nothing here opens a model or a socket.
"""

from dataclasses import dataclass

from lorikeet.proto.config_file import ConfigFile


@dataclass(frozen=True)
class ShardConfig(ConfigFile):
    """Everything a shard needs to know. "Auto" (None) is resolved where the needed fact is measured."""

    model_id: str
    """The name the model was asked for by, as shown to users."""
    model_path: str
    """Local folder with the configuration and weights."""
    listen: str
    """gRPC address: `unix:/private/folder/shard-0.sock` or `host:port`."""
    secret_path: str | None = None
    """File with the secret that routers show, on TCP."""
    tls_cert_path: str | None = None
    """This shard's certificate, and …"""
    tls_key_path: str | None = None
    """… its key, where TCP is encrypted."""
    tls_ca_path: str | None = None
    """Certificates of the authority whose routers may connect; None takes any."""
    ready_file: str | None = None
    """Path of a file that appears once requests are taken; None tells nobody."""
    device: str = "cpu"
    """`cpu` or `cuda:N`."""
    num_ranks: int = 1
    """Processes that the model is split over, on CUDA from that device on one each."""
    master_addr: str = "localhost"
    """Where they meet …"""
    master_port: int = 0
    """… 0 is any free port."""
    dtype: str | None = None
    """`float32`, `bfloat16` or `float16`; None takes the checkpoint's (float32 for float16 on CPU)."""
    quantize: str | None = None
    """What the weights are quantised by, as in `--quantize`; None is what the checkpoint says, if it does."""
    trust_remote_code: bool = False
    max_total_tokens: int = 4096
    """Prompt plus output of one request, in tokens."""
    step_tokens: int = 4096
    """Prompt tokens that one step computes at most (`--max-batch-prefill-tokens`)."""
    max_batch_total_tokens: int | None = None
    """Cap on KV tokens over all requests; None is what memory gives."""
    max_running: int = 256
    """Requests that run at once at most."""
    max_waiting: int = 64
    """Submitted requests that may wait for pages beyond the running ones; bounds the credit."""
    chunked_prefill: bool = True
    prefix_caching: bool = True
    cpu_memory: int | None = None
    """Bytes for KV and adapters on CPU; None takes a part of what is free."""
    cuda_memory_fraction: float = 1.0
    memory_wiggle_room: float = 0.9
    """Fraction of the memory left after loading that KV may take."""
    num_pages: int | None = None
    """Fixes the number of KV pages; None sizes them from memory."""
    page_size: int | None = None
    """Tokens per KV page; None is the attention backend's own."""
    attention: str = "auto"
    """Attention backend: `auto`, `reference`, `cpu`, …"""
    fusions: str = "auto"
    """`auto` computes chains of small operators by kernels of our own, `none` by torch's, one by one; `device` takes
    the kernels for CUDA on any device, for tests."""
    kv_cache_dtype: str = "auto"
    """What K and V are kept in: `auto`, the model's number format, or `fp8`."""
    commit_lag: int | None = None
    """0 commits a step before the next is launched, 1 after; None is 0 on CPU, 1 on CUDA."""
    graphs: bool | None = None
    """Whether steps run as CUDA graphs; None is where they can, with a warning where they cannot."""
    graph_rows: int = 256
    """Tokens of the largest step that runs as a graph."""
    threads: int | None = None
    """Torch's intra-op threads; None is all cores this process may use."""
    adapter_store: str | None = None
    """Folder of adapters in the served layout, by digest; None serves no adapters."""
    max_active_adapters: int = 1024
    """Adapters in slots at once at most."""
    adapter_memory_fraction: float = 0.1
    """Part of the device's memory (on CPU: of `cpu_memory`) that slots may take."""
    adapter_host_memory: int | None = None
    """Bytes of host memory for adapters; None is four times what slots may take. On CPU slots lie there too."""
    adapter_cycle_time_s: float = 2.0
    """So long an adapter may wait for a slot before one in use must give way."""
    speculation_max_batch_size: int = 32
    """With more running requests nothing is guessed."""
    ngram_min: int = 1
    """Tokens that must be found again, at least, for prompt lookup to guess …"""
    ngram_max: int = 8
    """… and those that are looked for, at most."""
    ngram_long: int = 4
    """Tokens found again from which prompt lookup goes before heads and draft model, where all may guess."""
    draft_model: str | None = None
    """Local folder of the draft model; None serves without one."""
    draft_model_id: str = ""
    """The name the draft model was asked for by."""
    draft_dtype: str | None = None
    """As `dtype`, of the draft model."""
    draft_quantize: str | None = None
    """As `quantize`, of the draft model."""
    step_timeout_s: float = 120.0
    """A step that takes longer hangs, and ends the process; 0 is never."""
    served_file: str | None = None
    """Path of a file that appears once a request was completed; None tells nobody."""
    watermark_gamma: float = 0.5
    watermark_delta: float = 2.0
    json_output: bool = False
    log_level: str = "info"
    parent_pid: int | None = None
    """The shard ends when this process is gone."""
