"""The table of all flags. The parser, `--help`, variables and the fields of the processes' configurations are derived
from it. A row says what the flag does, or why it has no effect, or why it is rejected.
"""

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
from lorikeet.proto.draft_sources import methods
from lorikeet.proto.pooling import POOLINGS
from lorikeet.proto.quantization import METHODS

DTYPES = ("float16", "bfloat16", "float32")
OTHER_DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}

_MODEL: dict[str, tuple[Flag, ...]] = {
    "Model": (
        Flag(
            "model-id", "base model: hub id, `id@revision`, local folder or .gguf file",
            default_text="the demo's model, lorikeet/smollm2",
            differs="without it SmolLM2-135M-Instruct is downloaded once and served with the demo's adapters; without "
            "network lorikeet/base, which is part of the installation",
        ),
        Flag(
            "served-model-name",
            "names of the base model in requests and answers, the first one in answers; --model-id stays valid too",
            default=(), to=ROUTER, field_name="served_model_names", repeated=True, new=True,
            default_text="model-id; of a path the name of the folder or file",
        ),
        Flag("revision", "branch, tag or commit of the base model at the hub"),
        Flag(
            "source", "source of the base model; a local folder needs none", default="hub", choices=("hub", "s3"),
            refused="base models come from the hub or a local folder in this version", harmless=("hub",),
        ),
        Flag(
            "dtype", "data type of the weights; `auto` is the checkpoint's", to=SHARD | LOADER,
            default_text="the checkpoint's", choices=DTYPES, synonyms=OTHER_DTYPES, unset="auto",
            differs="`float32` exists; vLLM's `auto`, `half` and `float` are understood",
        ),
        Flag(
            "quantize", "quantization method", to=SHARD, computed=True, default_text="the checkpoint's",
            choices=tuple(METHODS),
            differs="unsupported methods are rejected with an error that names them (docs/quantization.md); may be "
            "combined with `--dtype`, which adapters use",
        ),
        Flag(
            "quantize-activations",
            "what integer weights round activations to; `none` keeps their data type, and is slower on CPU", to=SHARD,
            choices=("int8", "none"), default_text="int8 on CPU, none on CUDA", new=True,
        ),
        Flag(
            "trust-remote-code", "run Python code from the model's repository", SWITCH, False, ROUTER | SHARD | LOADER,
        ),
        Flag(
            "tokenizer-config-path", "file that replaces tokenizer_config.json (chat template)", to=ROUTER,
            must_exist="file",
        ),
        Flag(
            "chat-template", "the base model's chat template: a file, or the template itself", to=ROUTER, computed=True,
            default_text="the model's", new=True,
        ),
        Flag(
            "pooling",
            "compute vectors instead of text, from the hidden state of the first token (`cls`), the `mean` of all, or "
            "that of the `last` token", to=ROUTER | SHARD | LOADER, choices=POOLINGS, new=True,
            default_text="from the model's files",
        ),
        Flag(
            "embedding-dim", "dimensions of an embedding model that has several projections (2_Dense_N)", INTEGER,
            to=ROUTER | SHARD | LOADER, default_text="from the model's files", minimum=1,
            differs="also makes a causal model an embedding model",
        ),
        Flag("huggingface-hub-cache", "download cache", default_text="that of huggingface-hub"),
        Flag(
            "weights-cache-override", "folder with the weight files; all other files still come from the model",
            must_exist="folder",
        ),
        Flag("download-only", "download the models, print their folders and exit", SWITCH, False),
    ),
    "Limits of a request": (
        Flag(
            "max-input-length", "maximum prompt length in tokens", INTEGER, to=ROUTER | LAUNCHER,
            default_text="max-total-tokens − 1", minimum=1,
        ),
        Flag(
            "max-total-tokens", "maximum length of prompt and output together, in tokens", INTEGER, to=ROUTER | SHARD,
            default_text="the model's context, at most what KV memory holds", minimum=2,
            differs="LoRAX's default is at most 4096, and without this flag its routes still end a request without "
            "`max_new_tokens` there. The long factors of longrope, and more than 262144 tokens, need the flag. More "
            "than the model's positions are rejected, unless `--allow-long-max-total-tokens` is given",
        ),
        Flag(
            "allow-long-max-total-tokens",
            "accept --max-total-tokens above the model's positions, where its output may be nonsense", SWITCH, False,
            new=True,
        ),
        Flag("max-best-of", "maximum `best_of`", INTEGER, 2, ROUTER, minimum=1),
        Flag(
            "max-stop-sequences", "maximum number of stop sequences on LoRAX's routes; OpenAI's take 64", INTEGER, 4,
            ROUTER, minimum=0,
        ),
        Flag(
            "unknown-fields",
            "what LoRAX's routes do with a field that LoRAX does not have and that would change the text: `reject` it,"
            " or `ignore` it and name it in a header, as LoRAX ignores it", default="reject", to=ROUTER,
            choices=("reject", "ignore"), new=True,
        ),
        Flag(
            "trust-request-chat-template",
            "let chat requests bring their own `chat_template`, rendered in a separate process", SWITCH, False, ROUTER,
            new=True,
        ),
        Flag(
            "max-body-bytes", "maximum size of a request body; above it 413", BYTES, 16 << 20, ROUTER, minimum=1,
            new=True,
        ),
        Flag(
            "max-body-memory",
            "memory for all request bodies together; above it bodies wait, then 503. One caller gets a quarter", BYTES,
            128 << 20, ROUTER, minimum=1 << 20, new=True,
        ),
        Flag(
            "request-timeout-s", "time limit of a request, in seconds; above it 504", NUMBER, to=ROUTER,
            default_text="none", minimum=0.001, new=True,
        ),
        Flag(
            "max-queue-seconds", "maximum time in the queue, in seconds; above it 429", NUMBER, to=ROUTER,
            default_text="none", minimum=0.001, new=True,
        ),
    ),
    "Sampling": (
        Flag("watermark-gamma", "fraction of green tokens of the watermark", NUMBER, 0.5, SHARD, minimum=0, maximum=1),
        Flag("watermark-delta", "added to the logits of green tokens", NUMBER, 2.0, SHARD),
    ),
}  # fmt: skip

TOKENS_WITH_A_DRAFT = 4
"""The default of `--speculative-tokens` with a draft model."""

_SPECULATION: dict[str, tuple[Flag, ...]] = {
    "Speculation": (
        Flag(
            "speculative-tokens", "draft tokens per step, unless the request says otherwise", INTEGER, to=ROUTER,
            default_text="4 with a draft model, else 0", minimum=0,
        ),
        Flag(
            "speculative-tokens-max", "maximum of `speculative_tokens` in requests", INTEGER, 16, ROUTER, minimum=0,
            maximum=64, new=True,
        ),
        Flag(
            "speculation-max-batch-size", "disable speculation when more than this many requests are running", INTEGER,
            32, SHARD, minimum=0,
        ),
        Flag(
            "speculative-method", "source of draft tokens, unless the request says otherwise; `ngram` is `lookup`",
            default="auto", to=ROUTER, choices=methods(),
            synonyms={"ngram": "lookup"}, new=True,
        ),
        Flag(
            "speculative-schedule", "how the number of draft tokens, up to the maximum, is chosen for each step",
            default="auto", to=ROUTER, choices=("constant", "heuristic", "auto"), new=True,
        ),
        Flag(
            "speculative-verification",
            "how tokens of the draft model are verified: `shared-noise` samples draft and target with the same random"
            " noise (Gumbel coupling), `rejection` (also `google`, `deepmind`) is rejection sampling",
            default="shared-noise", to=ROUTER, choices=("shared-noise", "rejection"),
            synonyms={"coupled": "shared-noise", "google": "rejection", "deepmind": "rejection"}, new=True,
            formerly="verify",
        ),
        Flag("ngram-min", "minimum n-gram length of prompt lookup", INTEGER, 1, SHARD, minimum=1, maximum=32, new=True),
        Flag("ngram-max", "maximum n-gram length of prompt lookup", INTEGER, 8, SHARD, minimum=1, maximum=32, new=True),
        Flag(
            "ngram-long", "n-gram length from which prompt lookup takes precedence over heads and draft model", INTEGER,
            4, SHARD, minimum=1, maximum=32, new=True,
        ),
        Flag(
            "speculative-history", "propose the outputs of earlier requests of the same tenant and adapter as drafts, "
            "unless the request or its alias says otherwise", SWITCH, False, ROUTER | SHARD, new=True,
        ),
        Flag(
            "history-memory", "memory of a shard for outputs of earlier requests, which history drafts propose", BYTES,
            256 << 20, SHARD, minimum=0, new=True,
        ),
        Flag(
            "learn-heads", "learn Medusa heads from the outputs, for each tenant and adapter, unless the alias says "
            "otherwise; CPU only", SWITCH, False, ROUTER | SHARD, new=True,
        ),
        Flag(
            "learning-memory", "memory of a shard for outputs and hidden states that heads are learned from; 0 learns "
            "none", BYTES, 256 << 20, SHARD, minimum=0, new=True,
        ),
        Flag(
            "draft-model-id", "draft model: hub id, `id@revision` or local folder; needs the base model's tokenizer",
            new=True,
        ),
        Flag("draft-revision", "branch, tag or commit of the draft model at the hub", new=True),
        Flag(
            "draft-tokenizer-id", "model whose tokenizer the draft model uses, if its own files do not include one",
            default_text="draft-model-id", new=True,
        ),
        Flag(
            "draft-dtype", "data type of the draft model's weights; `auto` is the checkpoint's", to=SHARD,
            default_text="the checkpoint's", choices=DTYPES, synonyms=OTHER_DTYPES, unset="auto", new=True,
        ),
        Flag(
            "draft-quantize", "quantization method of the draft model", to=SHARD, default_text="the checkpoint's",
            choices=tuple(METHODS), new=True,
        ),
    ),
}  # fmt: skip

_SOURCES = ("hub", "local", "s3", "pbase")

_ADAPTERS: dict[str, tuple[Flag, ...]] = {
    "Adapters": (
        Flag(
            "adapter-id", "default adapter; the server does not start if it cannot be loaded", to=ROUTER,
            differs="the base model stays available under its own id and as `__base_model__`",
        ),
        Flag("adapter-source", "source of --adapter-id", default="hub", to=ROUTER, choices=_SOURCES),
        Flag(
            "default-adapter-source", "source of adapters for requests without `adapter_source`", to=ROUTER,
            default_text="adapter-source", choices=_SOURCES,
        ),
        Flag(
            "preloaded-adapter-ids", "adapters loaded at startup and never evicted", default=(), to=ROUTER,
            repeated=True, differs="other adapters are still loaded on demand",
        ),
        Flag(
            "preloaded-adapter-source", "source of --preloaded-adapter-ids", to=ROUTER, default_text="adapter-source",
            choices=_SOURCES,
        ),
        Flag(
            "local-adapter-root", "folder that holds the adapter folders of the source `local`", default=(),
            to=ROUTER | LOADER, computed=True, default_text="the folder of --huggingface-hub-cache", repeated=True,
            separator=":", new=True, differs="LoRAX reads any folder of the machine",
        ),
        Flag(
            "s3-prefix", "bucket, or folder in one, whose adapters callers may name with the source `s3`", default=(),
            to=ROUTER, field_name="s3_prefixes", computed=True, repeated=True, separator=",", new=True,
            default_text="PREDIBASE_MODEL_BUCKET and _FOLDER, else any bucket, or none with --api-keys",
            differs="LoRAX reads any bucket",
        ),
        Flag(
            "adapters", "YAML file of adapters by alias; reloaded on SIGHUP and `POST /admin/catalogue/reload`",
            to=ROUTER, field_name="catalogue_path", default_text="none; the demo model includes one", must_exist="file",
            new=True,
        ),
        Flag(
            "strict-adapters",
            "exit at startup if an adapter named by a flag or the file cannot be loaded, and look for new versions of"
            " local adapters by all bytes of their files", SWITCH, False, ROUTER, new=True,
        ),
        Flag(
            "allow-base-model-name",
            "administrators may give an adapter a name of the base model, which requests get in its place", SWITCH,
            False, ROUTER, new=True,
        ),
        Flag(
            "no-adapter-downloads",
            "requests may name adapters of local folders only, besides those that a flag or the file names", SWITCH,
            False, ROUTER, new=True,
        ),
        Flag(
            "api-keys", "YAML file of the server's API keys, which lorikeet-keys writes; others get 401", to=ROUTER,
            field_name="keys_path", must_exist="file", new=True,
        ),
        Flag(
            "api-key",
            "API key of the server, as in vLLM; others get 401. Every user of the machine can read a command line:"
            " prefer the variable, or --api-keys", default=(), to=ROUTER, field_name="api_keys_sha256", computed=True,
            repeated=True, secret=True, new=True,
        ),
        Flag(
            "api-keys-optional", "serve requests without one of --api-keys too", SWITCH, False, ROUTER,
            "keys_optional", new=True,
        ),
        Flag(
            "metrics-without-key", "serve /metrics to requests without one of --api-keys", SWITCH, False, ROUTER,
            new=True,
        ),
        Flag(
            "share-prefixes", "API keys share cached prefixes, except those with `isolate: true`", SWITCH, False,
            ROUTER, new=True,
        ),
        Flag(
            "forward-bearer", "send Authorization tokens of any form to the hub, except this server's API keys", SWITCH,
            False, ROUTER, new=True,
        ),
        Flag(
            "admin-key-file", "file with the admin key; the variable ADMIN_KEY may hold the key instead", to=ROUTER,
            computed=True, new=True,
        ),
        Flag(
            "merge-adapter-weights", "merge --adapter-id into the base model", SWITCH, False, harmless=(False,),
            refused="adapters are never merged into the base model: --adapter-id alone answers the same requests",
        ),
        Flag("max-active-adapters", "maximum number of adapters in device slots", INTEGER, 1024, SHARD, minimum=1),
        Flag(
            "adapter-extra-vocab-size",
            "rows of the embedding and the output head after those of the base model, for tokens that adapters add; "
            "one device, without --quantize", INTEGER, 0, ROUTER | SHARD | LOADER, minimum=0, maximum=65_536, new=True,
        ),
        Flag(
            "adapter-cycle-time-s", "seconds an adapter waits for a slot before one in use is evicted", INTEGER, 2,
            SHARD, minimum=0,
        ),
        Flag(
            "adapter-memory-fraction", "fraction of device memory for adapters", NUMBER, to=SHARD, minimum=0, maximum=1,
            default_text="0.1 on CPU; on CUDA 128 ranks of all modules, or 0.04 of the memory left by the model",
            differs="on CUDA the default is less than a tenth of the device, which leaves more memory to KV",
        ),
        Flag(
            "adapter-host-memory", "host memory for adapters, in addition to device memory", BYTES, to=SHARD,
            default_text="on CUDA 0.4 of the device memory, if the host has it", minimum=0, new=True,
        ),
        Flag(
            "adapter-disk-cache",
            "disk space for converted adapters; least recently used ones are removed first; 503 where none can be",
            BYTES, 64 << 30, SHARD | LOADER, "store_bytes", minimum=1, new=True,
        ),
        Flag(
            "adapter-store", "folder of converted adapters; may be shared between servers", to=SHARD | LOADER,
            computed=True, default_text="lorikeet-adapters in the folder of --huggingface-hub-cache", new=True,
        ),
        Flag(
            "max-adapter-size", "maximum size of an adapter's weights; above it 422, before the download", BYTES,
            8 << 30, ROUTER | LOADER, computed=True, minimum=1, new=True,
        ),
        Flag(
            "max-queued-per-adapter", "maximum number of queued requests per adapter; above it 429", INTEGER, to=ROUTER,
            default_text="max-concurrent-requests", minimum=1, new=True,
        ),
        Flag(
            "auth-cache-ttl-s", "seconds for which a source's authorization result, positive or negative, is cached",
            NUMBER, 60.0, ROUTER, minimum=0, new=True,
        ),
        Flag(
            "auth-stale-s", "seconds for which a positive result stays valid while its source is unreachable", NUMBER,
            900.0, ROUTER, minimum=0, new=True,
        ),
        Flag(
            "lorax-use-global-hf-token", "requests without a token use the server's HF_TOKEN", SWITCH, False, ROUTER,
            "use_hub_token_for_all", new=True,
        ),
        Flag(
            "predibase-api-token", "token of Predibase's service", secret=True,
            no_effect="Predibase's service is not a source",
        ),
    ),
    "Adapters, as in vLLM": (
        Flag(
            "lora-modules",
            'adapters by name: `name=path`, or `{"name": …, "path": …}`; a path is a folder, anywhere, or a hub id',
            default=(), to=ROUTER, computed=True, repeated=True, separator=" ", new=True,
        ),
        Flag(
            "max-loras", "maximum number of adapters in device slots; sets", INTEGER, minimum=1,
            stands_for="max-active-adapters", default_text="value of --max-active-adapters", new=True,
        ),
        Flag(
            "enable-lora", "serve adapters", SWITCH, False, new=True, no_effect="adapters are always served",
        ),
        Flag(
            "max-lora-rank", "maximum rank of an adapter", INTEGER, minimum=1, new=True,
            no_effect="adapters of any rank are served",
        ),
    ),
}  # fmt: skip

_NO_PHASES = "steps have no separate prefill and decode phases to balance"
_CPU_GRAPHS = "there are no CUDA graphs on a CPU"
_OWN_KERNELS = "kernels are chosen by device and model"
_NO_NGROK = "tunnels are not part of the server (nor do they work in LoRAX)"

_MACHINE: dict[str, tuple[Flag, ...]] = {
    "Throughput and memory": (
        Flag(
            "max-concurrent-requests",
            "maximum number of requests in the server, an eighth more for callers with few; above it 429",
            INTEGER,
            1024,
            ROUTER,
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
        Flag(
            "allowed-hosts",
            "further names in `Host` on connections over loopback to a server without API keys; `*` is any name",
            default=(), to=ROUTER, repeated=True, new=True,
        ),
        Flag(
            "cors-allow-origin", "allowed CORS origins", default=(), to=ROUTER, repeated=True,
            default_text="any with API keys, else this server's own and loopback's",
            differs="without API keys, LoRAX allows any origin",
        ),
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

GROUPS: dict[str, tuple[Flag, ...]] = {**_MODEL, **_SPECULATION, **_ADAPTERS, **_MACHINE}

FLAGS: dict[str, Flag] = {flag.name: flag for group in GROUPS.values() for flag in group}

FORMER_NAMES: dict[str, str] = {flag.formerly: name for name, flag in FLAGS.items() if flag.formerly}
"""Deprecated names of flags, and the names of today."""

MOST_USED = (
    *("model-id", "port", "hostname", "local-adapter-root", "adapters", "adapter-id", "speculative-tokens"),
    *("speculative-method", "draft-model-id", "max-total-tokens", "max-concurrent-requests", "dtype", "quantize"),
    *("device", "num-shard", "replicas", "api-keys", "json-output", "config", "print-config"),
)
"""Flags that `--help` shows first."""
