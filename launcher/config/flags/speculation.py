"""Rows of the flag table: who guesses tokens ahead, how many, and the draft model."""

from lorikeet.launcher.config.flag import Flag, Kind
from lorikeet.proto.quantization import METHODS

TOKENS_WITH_A_DRAFT = 4
"""`--speculative-tokens` where there is a draft model and nobody says how many."""

GROUPS: dict[str, tuple[Flag, ...]] = {
    "Speculation": (
        Flag(
            "speculative-tokens",
            Kind.INTEGER,
            None,
            "tokens that are guessed per step where a request says nothing",
            default_text="4 with a draft model, else 0",
            least=0,
        ),
        Flag(
            "speculative-tokens-max",
            Kind.INTEGER,
            16,
            "what a request may ask for as `speculative_tokens`",
            least=0,
            most=64,
            lorax=False,
        ),
        Flag(
            "speculation-max-batch-size",
            Kind.INTEGER,
            32,
            "running requests above which nothing is guessed",
            least=0,
        ),
        Flag(
            "speculative-method",
            Kind.TEXT,
            "auto",
            "what guesses where a request does not say; `ngram` is `lookup`",
            choices=("auto", "lookup", "ngram", "medusa", "draft", "off"),
            lorax=False,
        ),
        Flag(
            "speculative-schedule",
            Kind.TEXT,
            "auto",
            "how many tokens are guessed, up to the number above, where a request does not say",
            choices=("constant", "heuristic", "auto"),
            lorax=False,
        ),
        Flag(
            "verify",
            Kind.TEXT,
            "coupled",
            "rule by which guesses of a draft model are accepted; `google` and `deepmind` are `rejection`",
            choices=("coupled", "rejection", "google", "deepmind"),
            lorax=False,
        ),
        Flag("ngram-min", Kind.INTEGER, 1, "tokens that prompt lookup must find again", least=1, most=32, lorax=False),
        Flag("ngram-max", Kind.INTEGER, 8, "tokens that prompt lookup looks for", least=1, most=32, lorax=False),
        Flag(
            "ngram-long",
            Kind.INTEGER,
            4,
            "tokens found again from which prompt lookup goes before heads and draft model",
            least=1,
            most=32,
            lorax=False,
        ),
        Flag(
            "draft-model-id",
            Kind.TEXT,
            None,
            "small model that guesses for the base model: hub id, `id@revision` or local folder; same tokenizer",
            lorax=False,
        ),
        Flag(
            "draft-revision",
            Kind.TEXT,
            None,
            "branch, tag or commit of the draft model at the hub",
            lorax=False,
        ),
        Flag(
            "draft-tokenizer-id",
            Kind.TEXT,
            None,
            "whose tokenizer the draft model was trained with, where its own files do not say",
            default_text="draft-model-id",
            lorax=False,
        ),
        Flag(
            "draft-dtype",
            Kind.TEXT,
            None,
            "number format of the draft model's weights",
            default_text="the checkpoint's",
            choices=("float16", "bfloat16", "float32"),
            lorax=False,
        ),
        Flag(
            "draft-quantize",
            Kind.TEXT,
            None,
            "quantization of the draft model",
            default_text="the checkpoint's",
            choices=tuple(METHODS),
            lorax=False,
        ),
    ),
}
