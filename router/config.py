"""What a router process is told at start: one frozen dataclass, read from the JSON file that the launcher wrote.

Knows names and defaults only; nothing here opens a socket.
"""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from lorikeet.adapters.sources.settings import SourceSettings


@dataclass(frozen=True)
class RouterConfig:
    """Everything a router needs to know."""

    model_id: str
    """The name the model was asked for by, as clients write it in `model`."""
    model_path: str
    """Local folder with configuration, tokenizer and chat template."""
    shard_addresses: tuple[str, ...]
    """gRPC addresses: `unix:/private/folder/shard-0.sock` or `host:port`; `dns:host:port` is all that the name stands
    for just now, `file:/path` a JSON list."""
    shard_secret_path: str | None = None
    """File with the secret that is shown to shards on TCP."""
    shard_tls_ca_path: str | None = None
    """Certificates of the authority of shards on TCP, which encrypt then."""
    shard_tls_cert_path: str | None = None
    """The certificate that is shown to them, and …"""
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
    """A bound socket that was inherited, in place of `hostname` and `port`."""
    ready_file: str | None = None
    """Path of a file that appears once requests are welcome; None tells nobody."""
    replacement_file: str | None = None
    """Path of a file that is there while another router serves on the socket: this one listens once it is ready."""
    max_concurrent_requests: int = 1024
    """Requests inside the server (queued and running); above it 429."""
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_input_length: int = 4095
    max_total_tokens: int = 4096
    speculative_tokens: int | None = None
    """Tokens guessed per step for requests that say nothing about it; None is 4 with a draft model, else 0."""
    speculative_tokens_max: int = 16
    """What a request may ask for."""
    speculative_method: str = "auto"
    """What guesses for requests that don't say: auto, lookup, medusa, draft or off."""
    speculative_schedule: str = "auto"
    """How many tokens are guessed, up to that number, where a request doesn't say: constant, heuristic or auto."""
    speculative_verify: str = "coupled"
    """How guesses are verified where a request doesn't say: coupled or rejection."""
    draft_model_id: str | None = None
    """The name the draft model was asked for by; None is what the shard says."""
    stuck_files: tuple[str, ...] = ()
    """By shard: path of a file that asks the launcher to end it, since it hangs; none where nobody looks."""
    step_timeout_s: float = 120.0
    """A shard whose step takes longer is given up, and its requests go elsewhere; 0 is never."""
    recovery_timeout_s: float = 300.0
    """So long requests wait for a shard to come back when there is none."""
    loader_address: str | None = None
    """Unix socket of the adapters' loader; None serves the base model alone."""
    sources: SourceSettings = field(default_factory=SourceSettings)
    adapter_id: str | None = None
    """Adapter of requests that name none."""
    adapter_source: str = "hub"
    """Where `adapter_id` comes from."""
    default_adapter_source: str | None = None
    """Where adapters of requests come from that name no source; None is `adapter_source`."""
    preloaded_adapter_ids: tuple[str, ...] = ()
    preloaded_adapter_source: str | None = None
    catalogue_path: str | None = None
    """YAML file of adapters by alias."""
    strict_adapters: bool = False
    """A named adapter that cannot be served ends the router."""
    keys_path: str | None = None
    """YAML file of the server's own API keys."""
    admin_key_sha256: str | None = None
    max_queued_per_adapter: int | None = None
    """Requests that wait for one adapter; above it 429. None is `max_concurrent_requests`."""
    auth_cache_ttl_s: float = 60.0
    """So long a source's word on a caller's right is good."""
    auth_stale_s: float = 900.0
    """So long after its last proof a right to a private adapter holds where the source gives no answer."""
    hub_token: str | None = field(default=None, repr=False)
    """The operator's own, for adapters that the operator names."""
    use_hub_token_for_all: bool = False
    """Requests without a token use the operator's."""
    max_body_bytes: int = 16 * 1024 * 1024
    validation_workers: int = 2
    """Threads that tokenize."""
    receipts_path: str | None = None
    """A file that gets a line per finished text: what it follows from, as hashes where those are tokens."""
    usage_log: str | None = None
    """File that gets a line of JSON for every request that has ended."""
    request_logger_url: str | None = field(default=None, repr=False)
    """Gets a POST for every request that generated something. It may hold credentials."""
    log_texts: bool = False
    """Prompts and outputs go there too."""
    request_timeout_s: float | None = None
    """Ends a request so long after its arrival, with 504; None never."""
    max_queue_seconds: float | None = None
    """A request that waited so long for a shard gets 429; None never."""
    drain_timeout_s: float = 60.0
    cors_allow_origin: tuple[str, ...] = ()
    cors_allow_header: tuple[str, ...] = ()
    cors_allow_method: tuple[str, ...] = ()
    cors_expose_header: tuple[str, ...] = ()
    cors_allow_credentials: bool | None = None
    json_output: bool = False
    log_level: str = "info"
    parent_pid: int | None = None
    """The router ends when this process is gone."""
    effective_configuration: dict[str, Any] | None = None
    """Every launcher flag with its effective value, shown by `/info`."""

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read the JSON file at `path`. Raises ValueError that names unknown fields."""
        values = json.loads(Path(path).read_text())
        unknown = sorted(set(values) - {each.name for each in fields(cls)})
        if unknown:
            raise ValueError(f"unknown router configuration fields: {', '.join(unknown)}")
        settled: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        if "sources" in settled:
            settled["sources"] = SourceSettings.from_dict(settled["sources"])
        return cls(**settled)

    @property
    def most_queued_per_adapter(self) -> int:
        return self.max_queued_per_adapter or self.max_concurrent_requests
