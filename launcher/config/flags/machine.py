"""Rows of the flag table: memory, devices, addresses, logs."""

from lorikeet.launcher.config.flag import (
    BOOLEAN,
    BYTES,
    INTEGER,
    LAUNCHER,
    LOADER,
    NUMBER,
    ROUTER,
    SHARD,
    SWITCH,
    Flag,
)
from lorikeet.proto import server_url

_NO_PHASES = "steps have no separate prefill and decode phases to balance"
_CPU_GRAPHS = "there are no CUDA graphs on a CPU"
_OWN_KERNELS = "kernels are chosen by device and model"
_NO_NGROK = "tunnels are not part of the server (nor do they work in LoRAX)"

GROUPS: dict[str, tuple[Flag, ...]] = {
    "Throughput and memory": (
        Flag(
            "max-concurrent-requests", "maximum number of requests in the server; above it 429", INTEGER, 1024, ROUTER,
            minimum=1,
        ),
        Flag(
            "max-sequences-share",
            "share of max-concurrent-requests that one request may take with its prompts and choices (`n`); at least"
            " max-best-of sequences", NUMBER, 0.125, ROUTER, minimum=0, maximum=1, new=True,
        ),
        Flag(
            "max-batch-prefill-tokens", "maximum number of prompt tokens per step", INTEGER, to=SHARD,
            field_name="step_tokens", minimum=1,
            default_text="max-input-length + 50, without --max-total-tokens at most 4145",
            differs="a budget per step; measured times of steps make it smaller, so that streams do not pause",
        ),
        Flag(
            "max-batch-total-tokens", "maximum number of tokens in the KV cache", INTEGER, to=SHARD,
            default_text="what memory allows", minimum=1,
        ),
        Flag(
            "chunked-prefill", "split long prompts over several steps", BOOLEAN, True, SHARD,
            differs="on by default; `false` turns it off",
        ),
        Flag(
            "prefix-caching", "enable automatic prefix caching", BOOLEAN, True, SHARD,
            differs="on by default; `false` turns it off",
        ),
        Flag(
            "kv-cache-dtype", "data type of the KV cache: `auto` is the model's, `fp8` halves its memory (CUDA only)",
            default="auto", to=SHARD, computed=True, choices=("auto", "fp8"), new=True,
        ),
        Flag(
            "cuda-memory-fraction", "fraction of device memory to use", NUMBER, 1.0, SHARD, minimum=0.01, maximum=1,
            no_effect="there is no CUDA device in use", no_effect_on="cpu",
        ),
        Flag(
            "memory-wiggle-room", "fraction of the memory left after loading that the KV cache uses", NUMBER, 0.9,
            SHARD, computed=True, minimum=0.01, maximum=1,
        ),
        Flag(
            "cpu-memory", "memory for KV cache and adapters on CPU, such as 4GiB", BYTES, to=SHARD,
            default_text="a part of the free memory", minimum=1, new=True,
            no_effect="the KV cache is on the CUDA device", no_effect_on="cuda",
        ),
        Flag(
            "validation-workers", "threads that tokenize; one more is for texts above 64 KiB", INTEGER, 2, ROUTER,
            minimum=1,
        ),
        Flag(
            "threads", "compute threads of a shard; on CPU pinned to cores, if there are as many cores", INTEGER,
            to=SHARD, computed=True, default_text="all cores", minimum=1, new=True,
        ),
        Flag("waiting-served-ratio", "when waiting requests preempt running ones", NUMBER, 1.2, no_effect=_NO_PHASES),
        Flag("max-waiting-tokens", "steps before waiting requests are admitted", INTEGER, 20, no_effect=_NO_PHASES),
        Flag("eager-prefill", "prefill before decoding running requests", BOOLEAN, True, no_effect=_NO_PHASES),
    ),
    "Devices": (
        Flag(
            "device", "`cpu`, `cuda`, `cuda:N`, or `auto`: the first CUDA device if there is one", default="auto",
            new=True,
        ),
        Flag(
            "replicas", "number of model replicas behind the router; on CUDA each has its own device", INTEGER, 1,
            minimum=1, maximum=64, new=True,
        ),
        Flag(
            "engine", "what starts shards: the launcher (`local`) or a Ray cluster", default="local",
            choices=("local", "ray"), new=True,
        ),
        Flag(
            "sharded", "use tensor parallelism over `--num-shard` devices, or those that the environment names",
            BOOLEAN, to=SHARD, computed=True,
        ),
        Flag(
            "num-shard", "tensor-parallel size: number of devices, on CPU of processes", INTEGER, to=SHARD,
            computed=True, default_text="devices in CUDA_VISIBLE_DEVICES, else 1", minimum=1, maximum=64,
        ),
        Flag("master-addr", "rendezvous address of tensor-parallel ranks", default="localhost", to=SHARD),
        Flag(
            "master-port", "rendezvous port; each replica uses the next one", INTEGER, to=SHARD, computed=True,
            default_text="a free one", minimum=1, maximum=65535,
            differs="a free port by default, so that several servers run on one machine",
        ),
        Flag(
            "symmetric-memory-all-reduce",
            "add small tensors of tensor-parallel ranks by one kernel over torch's symmetric memory in place of NCCL",
            SWITCH, False, SHARD, new=True,
        ),
        Flag(
            "compile", "run steps as CUDA graphs; exit at startup if they cannot be captured", SWITCH, False, SHARD,
            computed=True, default_text="CUDA graphs if possible, else a warning", no_effect=_CPU_GRAPHS,
            no_effect_on="cpu",
        ),
        Flag("eager", "never use CUDA graphs", SWITCH, False, SHARD, computed=True),
        Flag(
            "compile-max-batch-size",
            "maximum number of requests, and a quarter of the number of tokens (at most 512), of a CUDA graph",
            INTEGER, 128, SHARD, computed=True, minimum=1, maximum=1024, no_effect=_CPU_GRAPHS, no_effect_on="cpu",
            differs="draft and prompt tokens count too",
        ),
        Flag(
            "compile-max-rank", "maximum adapter rank with CUDA graphs", INTEGER, 64, minimum=0,
            no_effect="graphs support adapters of any rank",
        ),
        Flag(
            "compile-batch-size", "maximum batch size traced at startup", INTEGER, 32, minimum=1,
            no_effect="all graphs are captured at startup, so that no request waits for a capture",
        ),
        Flag(
            "disable-custom-kernels",
            "use PyTorch operators for norms, rotary embeddings, MLPs and sampling "
            "(slower; for debugging)", SWITCH, False, SHARD, computed=True,
            differs="on CPU too; attention, adapters and masks of grammars keep their kernels",
        ),
        Flag("disable-sgmv", "disable the SGMV kernel", SWITCH, False, no_effect=_OWN_KERNELS),
        Flag(
            "attention",
            "attention backend: `varlen` is torch's FlashAttention, `triton` our paged kernel, `cpu` our compiled "
            "kernel, `reference` slow; `auto` chooses by device, model and length", default="auto", to=SHARD,
            choices=("auto", "varlen", "triton", "cpu", "reference"), new=True,
        ),
        Flag("backend", "attention library", default="fa2", choices=("fa2", "flashinfer"), no_effect=_OWN_KERNELS),
    ),
    "Server": (
        Flag(
            "hostname", "listen address (HOSTNAME is ignored if it is the machine's own name, as set by shells)",
            default="0.0.0.0", to=ROUTER,
        ),
        Flag("port", "listen port", INTEGER, server_url.PORT, ROUTER, short="p", minimum=1, maximum=65535),
        Flag(
            "root-path",
            "path below which a reverse proxy serves the routes, such as `/llm`; the routes answer with and without it",
            default="", to=ROUTER, default_text="none", new=True,
        ),
        Flag(
            "ssl-certfile", "TLS certificate of the HTTP server, with its chain; HTTPS instead of HTTP", to=ROUTER,
            must_exist="file", new=True,
        ),
        Flag("ssl-keyfile", "private key of --ssl-certfile", to=ROUTER, must_exist="file", new=True),
        Flag(
            "ssl-ca-certs", "CA certificates that verify clients' certificates", to=ROUTER, must_exist="file", new=True,
        ),
        Flag(
            "ssl-cert-reqs", "client certificates: 0 none, 1 verified if sent, 2 required", INTEGER, 0, ROUTER,
            minimum=0, maximum=2, new=True,
        ),
        Flag("pid-file", "file for the launcher's process id while it runs", new=True),
        Flag(
            "trusted-proxies",
            "networks (CIDR) of reverse proxies whose `Forwarded` or `X-Forwarded-For` gives the client's address",
            default=(), to=ROUTER, repeated=True, new=True,
        ),
        Flag(
            "header-timeout-s", "seconds that a client has to send a request's header; above it 408", NUMBER, 10.0,
            ROUTER, minimum=0.1, new=True,
        ),
        Flag(
            "keep-alive-timeout-s",
            "seconds an idle connection stays open; set it above the idle timeout of a load balancer", NUMBER, 75.0,
            ROUTER, minimum=0.1, new=True,
        ),
        Flag(
            "max-connections-per-address",
            "maximum number of connections from one client address (IPv6: /64); trusted proxies have no limit; 0"
            " disables this", INTEGER, 2048, ROUTER, minimum=0, new=True,
        ),
        Flag(
            "shard-uds-path", "path prefix of the private folder of this run",
            default_text="lorikeet- in the temporary folder",
            differs="a private folder (0700) per run, not a path shared by all runs",
        ),
        Flag(
            "shard-address",
            "address of a remote shard, `host:port`; no shard is started here. `dns:host:port` is every shard"
            " that the name resolves to, `file:/path` a JSON list of addresses; both are polled", default=(),
            to=ROUTER | LAUNCHER, computed=True, repeated=True, new=True,
        ),
        Flag(
            "shard-listen", "start one shard for remote routers on `host:port`, and no router", to=SHARD | LAUNCHER,
            computed=True, new=True,
        ),
        Flag(
            "shard-secret-file", "file with the secret that routers present to shards over TCP", to=ROUTER | SHARD,
            computed=True, must_exist="file", new=True,
        ),
        Flag(
            "shard-tls-cert", "TLS certificate for connections between routers and shards", to=ROUTER | SHARD,
            field_name="shard_tls_cert_path", must_exist="file", new=True,
        ),
        Flag(
            "shard-tls-key", "private key of --shard-tls-cert", to=ROUTER | SHARD, field_name="shard_tls_key_path",
            must_exist="file", new=True,
        ),
        Flag(
            "shard-tls-ca", "CA certificates that verify the other side", to=ROUTER | SHARD,
            field_name="shard_tls_ca_path", must_exist="file", new=True,
        ),
        Flag(
            "step-timeout-s",
            "seconds before a hanging shard is restarted and its requests are retried; 0 disables this", NUMBER, 120.0,
            ROUTER | SHARD, minimum=0, new=True,
        ),
        Flag(
            "recovery-timeout-s", "seconds requests wait for a shard when all are down", NUMBER, 300.0, ROUTER,
            minimum=0, new=True,
        ),
        Flag(
            "drain-timeout-s", "seconds running requests get to finish after SIGTERM", NUMBER, 60.0, ROUTER | LAUNCHER,
            minimum=0, new=True,
        ),
        Flag("cors-allow-origin", "allowed CORS origins", default=(), to=ROUTER, repeated=True),
        Flag("cors-allow-header", "allowed CORS request headers", default=(), to=ROUTER, repeated=True),
        Flag("cors-expose-header", "exposed CORS response headers", default=(), to=ROUTER, repeated=True),
        Flag("cors-allow-method", "allowed CORS methods", default=(), to=ROUTER, repeated=True),
        Flag("cors-allow-credentials", "allow CORS credentials", BOOLEAN, to=ROUTER),
        Flag("ngrok", "open a tunnel", SWITCH, False, no_effect=_NO_NGROK),
        Flag("ngrok-authtoken", "token of the tunnel", secret=True, no_effect=_NO_NGROK),
        Flag("ngrok-edge", "edge of the tunnel", no_effect=_NO_NGROK),
    ),
    "Logs and information": (
        Flag("json-output", "write log lines as JSON", SWITCH, False, ROUTER | SHARD | LOADER),
        Flag(
            "receipts",
            "append a JSON line to this file for every finished request: what its output depends on, prompt and"
            " output as hashes; reopened on SIGHUP", to=ROUTER, field_name="receipts_path", new=True,
        ),
        Flag(
            "log-level", "log level", default="info", to=ROUTER | SHARD | LOADER,
            choices=("debug", "info", "warning", "error"), new=True,
        ),
        Flag(
            "hash-client-addresses", "replace client addresses in log lines by hashes, with a random key per process",
            SWITCH, False, ROUTER, new=True,
        ),
        Flag(
            "usage-log", "append a JSON line to this file for every finished request; reopened on SIGHUP", to=ROUTER,
            computed=True, new=True,
        ),
        Flag(
            "log-texts", "include prompts and outputs in --usage-log and REQUEST_LOGGER_URL", SWITCH, False, ROUTER,
            new=True,
        ),
        Flag(
            "metrics-prefix", "export metrics under the names of another server too; LoRAX's names are always there",
            default=(), to=ROUTER, choices=("vllm",), repeated=True, new=True,
        ),
        Flag(
            "otlp-endpoint", "OpenTelemetry collector that gets traces (OTLP over gRPC), such as http://localhost:4317",
            to=ROUTER,
        ),
        Flag(
            "otlp-sample-ratio", "share of requests that are traced, where their `traceparent` does not decide it",
            NUMBER, 1.0, ROUTER, minimum=0, maximum=1, new=True,
        ),
        Flag("env", "log the runtime environment", SWITCH, False, short="e", variable=False),
        Flag(
            "config", "YAML file of flags by name, or of AutoGluon-RAG's generator; flags and variables override it",
            variable=False, new=True,
        ),
        Flag("print-config", "print the effective configuration as JSON and exit", SWITCH, False, new=True),
    ),
}  # fmt: skip
