"""Rows of the flag table: adapters, their sources and storage, and access to them."""

from lorikeet.launcher.config.flag import BYTES, INTEGER, LOADER, NUMBER, ROUTER, SHARD, SWITCH, Flag

_SOURCES = ("hub", "local", "s3", "pbase")

GROUPS: dict[str, tuple[Flag, ...]] = {
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
