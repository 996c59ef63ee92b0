"""The configuration of a router process: names and defaults of the fields of the JSON file that the launcher writes."""

from dataclasses import dataclass, field, replace
from typing import Any

from lorikeet.adapters.sources.registry import SourceSettings
from lorikeet.proto.config_file import ConfigFile


@dataclass(frozen=True)
class RouterConfig(ConfigFile):
    """Most fields are launcher flags; docs/launcher.md describes those."""

    model_id: str
    """The model's name, as clients write it in `model`."""
    model_path: str
    """Local folder with configuration, tokenizer and chat template."""
    shard_addresses: tuple[str, ...]
    """gRPC addresses: `unix:/private/folder/shard-0.sock` or `host:port`; `dns:host:port` is every address that the
    name resolves to, `file:/path` a JSON list."""
    shard_secret_path: str | None = None
    """File with the secret that is presented to shards over TCP."""
    shard_tls_ca_path: str | None = None
    """CA certificates that verify shards; connections use TLS then."""
    shard_tls_cert_path: str | None = None
    """The client certificate for shards."""
    shard_tls_key_path: str | None = None
    """The private key of that certificate."""
    model_given: str = ""
    """What the operator gave as the model, a path among others: clients may write it too."""
    served_model_names: tuple[str, ...] = ()
    """Further names of the model; the first one is in answers."""
    model_sha: str | None = None
    """Commit of the model at the hub, if known."""
    tokenizer_config_path: str | None = None
    """Replaces the model's tokenizer_config.json (chat template)."""
    chat_template: str | None = None
    """Replaces the model's chat template."""
    trust_remote_code: bool = False
    pooling: str | None = None
    """`--pooling` of the shards."""
    embedding_dim: int | None = None
    """`--embedding-dim` of the shards."""
    adapter_extra_vocab_size: int = 0
    """`--adapter-extra-vocab-size` of the shards."""
    hostname: str = "0.0.0.0"
    port: int = 3000
    root_path: str = ""
    """Path below which a reverse proxy serves the routes; it may be removed from requests, or not."""
    ssl_certfile: str | None = None
    """TLS certificate; None serves plain HTTP."""
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    """CA certificates that verify clients' certificates."""
    ssl_cert_reqs: int = 0
    """Clients' certificates: 0 none, 1 verified if sent, 2 required."""
    trusted_proxies: tuple[str, ...] = ()
    """Networks of proxies whose `Forwarded` and `X-Forwarded-For` are believed."""
    hash_client_addresses: bool = False
    header_timeout_s: float = 10.0
    keep_alive_timeout_s: float = 75.0
    max_connections_per_address: int = 2048
    """0 is no limit."""
    listen_fd: int | None = None
    """An inherited, bound socket that is used instead of `hostname` and `port`."""
    ready_file: str | None = None
    """File that the router creates once it is ready."""
    replacement_file: str | None = None
    """File that exists while another router serves on the socket: this one listens only once it is ready."""
    max_concurrent_requests: int = 1024
    """Queued and running; above it 429."""
    max_sequences_share: float = 0.125
    """Share of `max_concurrent_requests` that the sequences of one request may take."""
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_input_length: int = 4095
    max_total_tokens: int = 4096
    """Shards may take less: see `within`."""
    default_total_tokens: int | None = None
    """Prompt and output together of a request to LoRAX's routes without `max_new_tokens`; None is what fits."""
    speculative_tokens: int | None = None
    """None is 4 with a draft model, else 0."""
    speculative_tokens_max: int = 16
    speculative_method: str = "auto"
    speculative_schedule: str = "auto"
    speculative_history: bool = False
    learn_heads: bool = False
    speculative_verification: str = "shared-noise"
    draft_model_id: str | None = None
    """The draft model's name; None is the one that the shard reports."""
    stuck_files: tuple[str, ...] = ()
    """By shard: file that the router creates when the shard hangs, so that the launcher restarts it."""
    step_timeout_s: float = 120.0
    """0 never times out."""
    recovery_timeout_s: float = 300.0
    loader_address: str | None = None
    """Unix socket of the adapter loader; None serves the base model only."""
    sources: SourceSettings = field(default_factory=SourceSettings)
    allow_base_model_name: bool = False
    """Whether administrators may give an adapter a name of the base model, which then names the adapter."""
    s3_prefixes: tuple[str, ...] | None = None
    """Buckets and folders of the source `s3` that callers may name; None is any. Aliases may be anywhere."""
    adapter_id: str | None = None
    adapter_source: str = "hub"
    default_adapter_source: str | None = None
    """None is `adapter_source`."""
    preloaded_adapter_ids: tuple[str, ...] = ()
    preloaded_adapter_source: str | None = None
    lora_modules: dict[str, list[str]] = field(default_factory=dict)
    """Source and id of further adapters by alias."""
    catalogue_path: str | None = None
    """YAML file of adapters by alias."""
    strict_adapters: bool = False
    no_adapter_downloads: bool = False
    """Adapters that the operator has not listed come from local folders only."""
    keys_path: str | None = None
    """YAML file of API keys."""
    api_keys_sha256: tuple[str, ...] = ()
    """Hashes of further API keys."""
    keys_optional: bool = False
    """Requests without a valid key are served."""
    metrics_without_key: bool = False
    """`/metrics` is open while keys close the server."""
    share_prefixes: bool = False
    """Keys share cached prefixes, unless they are isolated."""
    forward_bearer: bool = False
    """Any bearer token that is not, and was not, a key of this server goes to adapters' sources."""
    admin_key_sha256: str | None = None
    max_queued_per_adapter: int | None = None
    """None is `max_concurrent_requests`."""
    auth_cache_ttl_s: float = 60.0
    auth_stale_s: float = 900.0
    hub_token: str | None = field(default=None, repr=False)
    """The operator's token, for adapters that the operator names."""
    use_hub_token_for_all: bool = False
    """Requests without a token use `hub_token`."""
    unknown_fields: str = "reject"
    """`ignore` ignores fields that LoRAX's routes do not have, as LoRAX does."""
    trust_request_chat_template: bool = False
    """Requests may bring their own chat template."""
    max_body_bytes: int = 16 * 1024 * 1024
    max_body_memory: int = 128 * 1024 * 1024
    """Maximum bytes of all request bodies together, while they are read, decoded and parsed."""
    validation_workers: int = 2
    receipts_path: str | None = None
    """File of receipts, one JSON line per finished request."""
    usage_log: str | None = None
    """File of usage records, one JSON line per finished request."""
    request_logger_url: str | None = field(default=None, repr=False)
    """URL that receives a POST for every request that generated tokens. It may contain credentials."""
    log_texts: bool = False
    """Include prompts and outputs in both."""
    metrics_prefix: tuple[str, ...] = ()
    """Metric names that are exported in addition to LoRAX's."""
    otlp_endpoint: str | None = None
    """URL of an OpenTelemetry collector that gets traces over OTLP and gRPC."""
    otlp_sample_ratio: float = 1.0
    """Share of the requests that are traced, of those whose `traceparent` does not decide it."""
    request_timeout_s: float | None = None
    max_queue_seconds: float | None = None
    drain_timeout_s: float = 60.0
    allowed_hosts: tuple[str, ...] = ()
    """Names in `Host`, in addition to loopback's and `hostname`, on loopback connections; `*` is any."""
    cors_allow_origin: tuple[str, ...] = ()
    cors_allow_header: tuple[str, ...] = ()
    cors_allow_method: tuple[str, ...] = ()
    cors_expose_header: tuple[str, ...] = ()
    cors_allow_credentials: bool | None = None
    json_output: bool = False
    log_level: str = "info"
    failure_file: str | None = None
    """File for the reason of a failure; without one it is logged."""
    secrets_on_stdin: bool = False
    """`hub_token` and `request_logger_url` are read as JSON from standard input."""
    parent_pid: int | None = None
    """The router exits when this process does."""
    effective_configuration: dict[str, Any] | None = None
    """Every launcher flag with its effective value, for administrators at `/info`."""
    public_configuration: dict[str, Any] | None = None
    """The effective configuration without paths, addresses and other texts, for everyone."""

    @property
    def model_name(self) -> str:
        """The model's name in answers."""
        return self.served_model_names[0] if self.served_model_names else self.model_id

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names of the model in requests."""
        return (*self.served_model_names, *dict.fromkeys(filter(None, (self.model_id, self.model_given))))

    def within(self, max_total_tokens: int) -> "RouterConfig":
        """Return a copy for shards that take at most `max_total_tokens` tokens of prompt and output together."""
        if max_total_tokens >= self.max_total_tokens:
            return self
        room = self.max_total_tokens - self.max_input_length
        longest = min(self.max_input_length, max_total_tokens - min(room, 1))
        return replace(self, max_total_tokens=max_total_tokens, max_input_length=longest)

    @property
    def has_keys(self) -> bool:
        """Whether the server has API keys."""
        return self.keys_path is not None or bool(self.api_keys_sha256)

    @property
    def max_sequences(self) -> int:
        """Maximum sequences of one request: prompts times choices."""
        return max(self.max_best_of, int(self.max_sequences_share * self.max_concurrent_requests))

    @property
    def most_queued_per_adapter(self) -> int:
        return self.max_queued_per_adapter or self.max_concurrent_requests
