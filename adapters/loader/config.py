"""The loader's configuration: one frozen dataclass, read from the JSON file that the launcher writes."""

from dataclasses import dataclass, field

from lorikeet.adapters.formats.configuration import SERVED_KINDS
from lorikeet.adapters.sources.registry import SourceSettings
from lorikeet.proto.config_file import ConfigFile

DEFAULT_STORE_BYTES = 64 << 30


@dataclass(frozen=True)
class LoaderConfig(ConfigFile):
    """Everything the loader needs to know."""

    socket: str
    """Path of the Unix socket that the router connects to."""
    model_path: str
    """Local folder with the base's configuration and weights."""
    adapter_store: str
    """Folder of served layouts: the disk tier. Several processes of a host may share it."""
    store_bytes: int = DEFAULT_STORE_BYTES
    """Above this the least recently used files are removed (`--adapter-disk-cache`)."""
    sources: SourceSettings = field(default_factory=SourceSettings)
    device: str = "cpu"
    """Device of the shards: `cpu` or `cuda:N`."""
    dtype: str | None = None
    """Dtype of the shards: float32, bfloat16 or float16; None takes the checkpoint's (float32 for float16 on CPU)."""
    trust_remote_code: bool = False
    pooling: str | None = None
    """Pooling of the shards (`--pooling`); None without."""
    embedding_dim: int | None = None
    """Size of the shards' vectors (`--embedding-dim`); None without."""
    adapter_extra_vocab_size: int = 0
    """Rows of the shards' embedding and output head after the base's, for tokens that adapters add."""
    kinds: tuple[str, ...] = SERVED_KINDS
    """Kinds of changes that the shards support; adapters with other kinds are rejected."""
    max_fetches: int = 16
    """Concurrent downloads."""
    max_conversions: int | None = None
    """Concurrent conversions to the served layout, plus one urgent one; None is one per core, up to 4."""
    reading_cpu_s: float = 20.0
    """Processor time for reading one adapter, in addition to its bytes."""
    opening_cpu_s: float = 1.0
    """Processor time for opening its files, in addition to their bytes: what they hold is not known before."""
    opening_memory: int = 128 << 20
    """Bytes of memory for the same, in addition to ten times their own."""
    folding_cpu_s: float = 600.0
    """Processor time for reading an adapter of another type than LoRA, whose change to each module is computed."""
    pattern_cpu_s: float = 3.0
    """Processor time for reading an adapter whose configuration has patterns, which can take forever."""
    reading_memory: int = 1 << 30
    """Bytes of memory for reading one adapter, in addition to ten times its own, and to twice the base in float32 where
    its change to each module is computed.
    """
    json_output: bool = False
    log_level: str = "info"
    failure_file: str | None = None
    """File for the reason of a failure; without one it is logged."""
    preload: str | None = None
    """Socket of the process that has imported what workers need; None starts one alone."""
    parent_pid: int | None = None
    """The loader ends when this process is gone."""
