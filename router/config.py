"""The configuration of a router process: one frozen dataclass, read from the JSON file that the launcher writes."""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from lorikeet.adapters.sources.settings import SourceSettings


@dataclass(frozen=True)
class RouterConfig:
    """All settings of a router."""

    model_id: str
    """The model's name as given to the launcher; clients use it as `model`."""
    model_path: str
    """Local folder with configuration, tokenizer and chat template."""
    shard_addresses: tuple[str, ...]
    """gRPC addresses: `unix:/private/folder/shard-0.sock` or `host:port`; `dns:host:port` stands for all addresses that
    the name resolves to, `file:/path` for those in a JSON list."""
    shard_secret_path: str | None = None
    """File with the secret that is sent to shards on TCP."""
    shard_tls_ca_path: str | None = None
    """CA certificates of shards on TCP, which enables TLS."""
    shard_tls_cert_path: str | None = None
    """Client certificate for shards, and …"""
    shard_tls_key_path: str | None = None
    """… its key."""
    model_sha: str | None = None
    """Commit of the model at its hub, if known."""
    tokenizer_config_path: str | None = None
    """Overrides the model's tokenizer_config.json (chat template)."""
    trust_remote_code: bool = False
    hostname: str = "0.0.0.0"
    port: int = 3000
    listen_fd: int | None = None
    """An inherited, bound socket, instead of `hostname` and `port`."""
    ready_file: str | None = None
    """File that the router creates once requests are accepted."""
    replacement_file: str | None = None
    """File that exists while another router serves on the socket: this one then listens only once it is ready."""
    max_concurrent_requests: int = 1024
    """Queued and running requests; further ones get 429."""
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_input_length: int = 4095
    max_total_tokens: int = 4096
    speculative_tokens: int | None = None
    """Default number of draft tokens per step; None is 4 with a draft model, else 0."""
    speculative_tokens_max: int = 16
    """Maximum number of draft tokens of a request."""
    speculative_method: str = "auto"
    """Default method of speculation: auto, lookup, medusa, draft or off."""
    speculative_schedule: str = "auto"
    """Default schedule of the number of draft tokens: constant, heuristic or auto."""
    speculative_verify: str = "shared-noise"
    """Default verification of draft tokens: shared-noise or rejection."""
    draft_model_id: str | None = None
    """The draft model's name as given to the launcher; None for what the shard reports."""
    stuck_files: tuple[str, ...] = ()
    """By shard: path of a file whose creation asks the launcher to kill the shard, which hangs."""
    step_timeout_s: float = 120.0
    """A shard whose step takes longer is considered hung, and its requests are retried; 0 is never."""
    recovery_timeout_s: float = 300.0
    """How long requests wait for a shard when none is connected."""
    loader_address: str | None = None
    """Unix socket of the adapter loader; None serves the base model only."""
    sources: SourceSettings = field(default_factory=SourceSettings)
    adapter_id: str | None = None
    """Default adapter."""
    adapter_source: str = "hub"
    """Source of `adapter_id`."""
    default_adapter_source: str | None = None
    """Default source of adapters; None is `adapter_source`."""
    preloaded_adapter_ids: tuple[str, ...] = ()
    preloaded_adapter_source: str | None = None
    catalogue_path: str | None = None
    """YAML file of adapters by alias."""
    strict_adapters: bool = False
    """Whether an adapter of the operator that cannot be served ends the router."""
    keys_path: str | None = None
    """YAML file of the server's API keys."""
    admin_key_sha256: str | None = None
    max_queued_per_adapter: int | None = None
    """Queued requests per adapter; further ones get 429. None is `max_concurrent_requests`."""
    auth_cache_ttl_s: float = 60.0
    """How long a source's answer about a caller's access is cached."""
    auth_stale_s: float = 900.0
    """How long after its last confirmation access to a private adapter holds while the source is unreachable."""
    hub_token: str | None = field(default=None, repr=False)
    """The operator's token, for adapters that the operator names."""
    use_hub_token_for_all: bool = False
    """Whether requests without a token use the operator's."""
    max_body_bytes: int = 16 * 1024 * 1024
    validation_workers: int = 2
    """Tokenizer threads."""
    receipts_path: str | None = None
    """File that gets a receipt per finished text, with hashes instead of tokens."""
    usage_log: str | None = None
    """File that gets a line of JSON for every ended request."""
    request_logger_url: str | None = field(default=None, repr=False)
    """URL that gets a POST for every request that generated tokens. It may hold credentials."""
    log_texts: bool = False
    """Whether these records hold prompts and outputs."""
    request_timeout_s: float | None = None
    """Time after its arrival when a request fails with 504; None is never."""
    max_queue_seconds: float | None = None
    """Time in the queue after which a request gets 429; None is never."""
    drain_timeout_s: float = 60.0
    cors_allow_origin: tuple[str, ...] = ()
    cors_allow_header: tuple[str, ...] = ()
    cors_allow_method: tuple[str, ...] = ()
    cors_expose_header: tuple[str, ...] = ()
    cors_allow_credentials: bool | None = None
    json_output: bool = False
    log_level: str = "info"
    parent_pid: int | None = None
    """The router exits when this process does."""
    effective_configuration: dict[str, Any] | None = None
    """Every launcher flag with its effective value, for `/info`."""

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read the JSON file at `path`. Raises ValueError, which names unknown fields."""
        values = json.loads(Path(path).read_text())
        unknown = sorted(set(values) - {each.name for each in fields(cls)})
        if unknown:
            raise ValueError(f"unknown router configuration fields: {', '.join(unknown)}")
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        if "sources" in values:
            values["sources"] = SourceSettings.from_dict(values["sources"])
        return cls(**values)

    @property
    def most_queued_per_adapter(self) -> int:
        return self.max_queued_per_adapter or self.max_concurrent_requests
