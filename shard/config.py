"""The configuration of a shard process: names and defaults of the fields of the JSON file that the launcher writes."""

from dataclasses import dataclass

from lorikeet.proto.config_file import ConfigFile


@dataclass(frozen=True)
class ShardConfig(ConfigFile):
    """Most fields are launcher flags; docs/launcher.md describes those. Defaults of None are computed at startup."""

    model_id: str
    """The model's name, as shown to users."""
    model_path: str
    """Local folder with the configuration and weights."""
    listen: str
    """gRPC address: `unix:/private/folder/shard-0.sock` or `host:port`."""
    secret_path: str | None = None
    """File with the secret that routers present over TCP."""
    shard_tls_cert_path: str | None = None
    """The server certificate."""
    shard_tls_key_path: str | None = None
    """Its private key; connections over TCP use TLS then."""
    shard_tls_ca_path: str | None = None
    """CA certificates that verify routers; None accepts any router."""
    ready_file: str | None = None
    """File that the shard creates once it is ready."""
    device: str = "cpu"
    """`cpu` or `cuda:N`; `cuda` is `cuda:0`."""
    num_ranks: int = 1
    """Tensor-parallel size; on CUDA the ranks use consecutive devices, starting at `device`."""
    master_addr: str = "localhost"
    """Rendezvous host."""
    master_port: int = 0
    """Rendezvous port; 0 is any free one."""
    symmetric_memory_all_reduce: bool = False
    """Whether ranks on CUDA add small tensors by one kernel over symmetric memory, in place of NCCL."""
    dtype: str | None = None
    """`float32`, `bfloat16` or `float16`; None is the checkpoint's (float32 for float16 on CPU)."""
    quantize: str | None = None
    """Quantization method, as in `--quantize`; None is the checkpoint's."""
    quantize_activations: str | None = None
    """`int8` or `none`: what activations are rounded to with integer weights; None is int8 on CPU and none on CUDA."""
    trust_remote_code: bool = False
    pooling: str | None = None
    """`cls`, `mean` or `last`: the model computes vectors; None is what its files say."""
    embedding_dim: int | None = None
    """Dimensions of the vectors; None is what its files say."""
    adapter_extra_vocab_size: int = 0
    """Rows of the embedding and output head after those of the base, for tokens that adapters add; on CPU only."""
    max_total_tokens: int = 4096
    """Prompt and output of one request, in tokens."""
    fits_kv_memory: bool = False
    """Whether `max_total_tokens` is lowered to what the KV memory holds; else the shard does not start with less."""
    step_tokens: int = 4096
    """Maximum number of prompt tokens per step (`--max-batch-prefill-tokens`)."""
    max_batch_total_tokens: int | None = None
    """Maximum number of tokens in the KV cache; None is what memory allows."""
    max_running: int = 256
    """Maximum number of running requests."""
    max_waiting: int = 64
    """Maximum number of submitted requests that wait for pages; bounds the credit."""
    chunked_prefill: bool = True
    prefix_caching: bool = True
    cpu_memory: int | None = None
    """Bytes for KV cache and adapters on CPU; None is a part of the free memory."""
    cuda_memory_fraction: float = 1.0
    memory_wiggle_room: float = 0.9
    """Fraction of the memory left after loading that the KV cache uses."""
    num_pages: int | None = None
    """Number of KV pages; None computes it from memory."""
    page_size: int | None = None
    """Tokens per KV page; None is the attention backend's default."""
    attention: str = "auto"
    """Attention backend: `auto`, `varlen`, `triton`, `cpu` or `reference`."""
    fusions: str = "auto"
    """`auto` uses our fused kernels for chains of small operators, `none` PyTorch's operators; `device` uses the CUDA
    kernels on any device, for tests."""
    kv_cache_dtype: str = "auto"
    """Data type of the KV cache: `auto` (the model's) or `fp8`."""
    commit_lag: int | None = None
    """0 commits a step before the next is launched, 1 after; None is 0 on CPU, 1 on CUDA."""
    graphs: bool | None = None
    """Whether steps run as CUDA graphs; None tries, and warns if they cannot be captured."""
    graph_rows: int = 512
    """Rows (tokens) of the largest CUDA graph."""
    threads: int | None = None
    """PyTorch's intra-op threads; None is all cores of this process."""
    adapter_store: str | None = None
    """Folder of adapters in the served layout, by digest; None disables adapters."""
    max_active_adapters: int = 1024
    """Maximum number of adapters in slots."""
    adapter_memory_fraction: float | None = None
    """Fraction of device memory (on CPU: of `cpu_memory`) for slots; None is 0.1 on CPU, and what usual adapters need
    on CUDA.
    """
    adapter_host_memory: int | None = None
    """Bytes of host memory for adapters; None is computed from the memory of device and host. On CPU slots are part of
    it.
    """
    adapter_cycle_time_s: float = 2.0
    speculation_max_batch_size: int = 32
    ngram_min: int = 1
    ngram_max: int = 8
    ngram_long: int = 4
    speculative_history: bool = False
    """Whether requests use history drafts by default: without the kernels that they need, the shard does not start."""
    history_memory: int = 256 << 20
    """Bytes of the index of history drafts; 0 for none."""
    learn_heads: bool = False
    """Whether Medusa heads are learned from all requests; some are marked for it in any case."""
    learning_memory: int = 256 << 20
    """Bytes of the rows that heads are learned from; 0 learns none."""
    store_bytes: int = 64 << 30
    """Above this the least recently used files of the adapter store are removed."""
    draft_model: str | None = None
    """Local folder of the draft model, if there is one."""
    draft_model_id: str = ""
    """The draft model's name."""
    draft_dtype: str | None = None
    draft_quantize: str | None = None
    step_timeout_s: float = 120.0
    """A longer step ends the process; 0 never times out."""
    served_file: str | None = None
    """File that the shard creates once it has completed a request."""
    watermark_gamma: float = 0.5
    watermark_delta: float = 2.0
    json_output: bool = False
    log_level: str = "info"
    failure_file: str | None = None
    """File for the reason of a failure; without one it is logged."""
    parent_pid: int | None = None
    """The shard exits when this process does."""

    def __post_init__(self) -> None:
        if self.device == "cuda":  # ranks count from a number, and torch makes no device without one the current one
            object.__setattr__(self, "device", "cuda:0")
