"""What the loader's process is told at start: one frozen dataclass, read from the JSON file that the launcher wrote.

Knows names and defaults only; nothing here opens a model or a socket.
"""

from dataclasses import dataclass, field

from lorikeet.adapters.formats.configuration import SERVED_KINDS
from lorikeet.adapters.sources.settings import SourceSettings
from lorikeet.proto.config_file import ConfigFile

DEFAULT_STORE_BYTES = 64 << 30


@dataclass(frozen=True)
class LoaderConfig(ConfigFile):
    """Everything the loader needs to know."""

    socket: str
    """Path of the Unix socket on which the router is served."""
    model_path: str
    """Local folder with the base's configuration and weights."""
    adapter_store: str
    """Folder of served layouts: the disk tier. Hosts' processes may share it."""
    store_bytes: int = DEFAULT_STORE_BYTES
    """The least recently asked for is removed above this (`--adapter-disk-cache`)."""
    sources: SourceSettings = field(default_factory=SourceSettings)
    device: str = "cpu"
    """Of the shards: `cpu` or `cuda:N`."""
    dtype: str | None = None
    """Of the shards: `float32`, `bfloat16` or `float16`; None takes the checkpoint's (float32 for float16 on CPU)."""
    trust_remote_code: bool = False
    kinds: tuple[str, ...] = SERVED_KINDS
    """Kinds of change that the shards compute; an adapter with another is refused."""
    max_fetches: int = 16
    """Adapters that are brought from their sources at once."""
    max_conversions: int | None = None
    """Adapters that are read and laid out at once, one that is urgent beside them; None is one per core, up to 4."""
    reading_cpu_s: float = 20.0
    """Processor time that understanding one adapter may take, beside its bytes: patterns can take forever."""
    json_output: bool = False
    log_level: str = "info"
    parent_pid: int | None = None
    """The loader ends when this process is gone."""
