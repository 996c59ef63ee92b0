"""Rows of the flag table: speculative decoding and the draft model."""

from lorikeet.launcher.config.flag import BYTES, INTEGER, ROUTER, SHARD, SWITCH, Flag
from lorikeet.launcher.config.flags.model import DTYPES
from lorikeet.proto.draft_sources import methods
from lorikeet.proto.quantization import METHODS

TOKENS_WITH_A_DRAFT = 4
"""The default of `--speculative-tokens` with a draft model."""

GROUPS: dict[str, tuple[Flag, ...]] = {
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
            "draft-dtype", "data type of the draft model's weights", to=SHARD, default_text="the checkpoint's",
            choices=DTYPES, new=True,
        ),
        Flag(
            "draft-quantize", "quantization method of the draft model", to=SHARD, default_text="the checkpoint's",
            choices=tuple(METHODS), new=True,
        ),
    ),
}  # fmt: skip
