"""Rows of the flag table: the base model, limits of a request, sampling."""

from lorikeet.launcher.config.flag import BYTES, INTEGER, LAUNCHER, LOADER, NUMBER, ROUTER, SHARD, SWITCH, Flag
from lorikeet.proto.pooling import POOLINGS
from lorikeet.proto.quantization import METHODS

DTYPES = ("float16", "bfloat16", "float32")

GROUPS: dict[str, tuple[Flag, ...]] = {
    "Model": (
        Flag(
            "model-id", "base model: hub id, `id@revision`, local folder or .gguf file",
            default_text="the built-in demo model", differs="without it the built-in demo model is served",
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
            "dtype", "data type of the weights", to=SHARD | LOADER, default_text="the checkpoint's", choices=DTYPES,
            differs="`float32` exists",
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
