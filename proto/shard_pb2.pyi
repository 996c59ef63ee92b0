from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Source(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SOURCE_PREFILL: _ClassVar[Source]
    SOURCE_TARGET: _ClassVar[Source]
    SOURCE_LOOKUP: _ClassVar[Source]
    SOURCE_MEDUSA: _ClassVar[Source]
    SOURCE_DRAFT: _ClassVar[Source]
    SOURCE_RESAMPLE: _ClassVar[Source]
    SOURCE_BONUS: _ClassVar[Source]
    SOURCE_GRAMMAR: _ClassVar[Source]
    SOURCE_HISTORY: _ClassVar[Source]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_NONE: _ClassVar[FinishReason]
    FINISH_LENGTH: _ClassVar[FinishReason]
    FINISH_EOS: _ClassVar[FinishReason]
    FINISH_ABORTED: _ClassVar[FinishReason]
    FINISH_DEADLINE: _ClassVar[FinishReason]
    FINISH_ERROR: _ClassVar[FinishReason]
SOURCE_PREFILL: Source
SOURCE_TARGET: Source
SOURCE_LOOKUP: Source
SOURCE_MEDUSA: Source
SOURCE_DRAFT: Source
SOURCE_RESAMPLE: Source
SOURCE_BONUS: Source
SOURCE_GRAMMAR: Source
SOURCE_HISTORY: Source
FINISH_NONE: FinishReason
FINISH_LENGTH: FinishReason
FINISH_EOS: FinishReason
FINISH_ABORTED: FinishReason
FINISH_DEADLINE: FinishReason
FINISH_ERROR: FinishReason

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DigestRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DigestReply(_message.Message):
    __slots__ = ("sha256",)
    SHA256_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    def __init__(self, sha256: _Optional[str] = ...) -> None: ...

class ShardInfo(_message.Message):
    __slots__ = ("version", "model_id", "dtype", "device", "architecture", "vocab_size", "max_total_tokens", "page_size", "num_pages", "step_tokens", "max_running", "prefix_caching", "chunked_prefill", "draft_model_id", "watermark_gamma", "watermark_delta", "quantization", "num_ranks", "kv_cache_dtype", "token_masks", "grammars", "history", "learning", "adapter_slots", "rotary_factors", "most_composed", "outputs_socket", "pooled_model")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    CHUNKED_PREFILL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_GAMMA_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_DELTA_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MASKS_FIELD_NUMBER: _ClassVar[int]
    GRAMMARS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    LEARNING_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ROTARY_FACTORS_FIELD_NUMBER: _ClassVar[int]
    MOST_COMPOSED_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_SOCKET_FIELD_NUMBER: _ClassVar[int]
    POOLED_MODEL_FIELD_NUMBER: _ClassVar[int]
    version: str
    model_id: str
    dtype: str
    device: str
    architecture: str
    vocab_size: int
    max_total_tokens: int
    page_size: int
    num_pages: int
    step_tokens: int
    max_running: int
    prefix_caching: bool
    chunked_prefill: bool
    draft_model_id: str
    watermark_gamma: float
    watermark_delta: float
    quantization: str
    num_ranks: int
    kv_cache_dtype: str
    token_masks: bool
    grammars: bool
    history: bool
    learning: bool
    adapter_slots: int
    rotary_factors: str
    most_composed: int
    outputs_socket: bool
    pooled_model: PooledModel
    def __init__(self, version: _Optional[str] = ..., model_id: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., page_size: _Optional[int] = ..., num_pages: _Optional[int] = ..., step_tokens: _Optional[int] = ..., max_running: _Optional[int] = ..., prefix_caching: _Optional[bool] = ..., chunked_prefill: _Optional[bool] = ..., draft_model_id: _Optional[str] = ..., watermark_gamma: _Optional[float] = ..., watermark_delta: _Optional[float] = ..., quantization: _Optional[str] = ..., num_ranks: _Optional[int] = ..., kv_cache_dtype: _Optional[str] = ..., token_masks: _Optional[bool] = ..., grammars: _Optional[bool] = ..., history: _Optional[bool] = ..., learning: _Optional[bool] = ..., adapter_slots: _Optional[int] = ..., rotary_factors: _Optional[str] = ..., most_composed: _Optional[int] = ..., outputs_socket: _Optional[bool] = ..., pooled_model: _Optional[_Union[PooledModel, _Mapping]] = ...) -> None: ...

class PooledModel(_message.Message):
    __slots__ = ("task", "pooling", "size", "is_encoder", "is_whole")
    TASK_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    IS_ENCODER_FIELD_NUMBER: _ClassVar[int]
    IS_WHOLE_FIELD_NUMBER: _ClassVar[int]
    task: str
    pooling: str
    size: int
    is_encoder: bool
    is_whole: bool
    def __init__(self, task: _Optional[str] = ..., pooling: _Optional[str] = ..., size: _Optional[int] = ..., is_encoder: _Optional[bool] = ..., is_whole: _Optional[bool] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("submits", "abort_ids", "pins", "prefetches", "unload_digests", "watch_ms")
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    ABORT_IDS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    PREFETCHES_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    WATCH_MS_FIELD_NUMBER: _ClassVar[int]
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    abort_ids: _containers.RepeatedScalarFieldContainer[int]
    pins: _containers.RepeatedCompositeFieldContainer[Pin]
    prefetches: _containers.RepeatedCompositeFieldContainer[AdapterPin]
    unload_digests: _containers.RepeatedScalarFieldContainer[str]
    watch_ms: int
    def __init__(self, submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., abort_ids: _Optional[_Iterable[int]] = ..., pins: _Optional[_Iterable[_Union[Pin, _Mapping]]] = ..., prefetches: _Optional[_Iterable[_Union[AdapterPin, _Mapping]]] = ..., unload_digests: _Optional[_Iterable[str]] = ..., watch_ms: _Optional[int] = ...) -> None: ...

class AdapterPin(_message.Message):
    __slots__ = ("source", "id", "revision", "digest")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    source: str
    id: str
    revision: str
    digest: str
    def __init__(self, source: _Optional[str] = ..., id: _Optional[str] = ..., revision: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class Pin(_message.Message):
    __slots__ = ("digest", "pinned")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    digest: str
    pinned: bool
    def __init__(self, digest: _Optional[str] = ..., pinned: _Optional[bool] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("id", "prompt_ids", "num_emitted", "max_new_tokens", "seed", "sampling", "stop_ids", "adapter", "speculation", "prediction_ids", "deadline_ms", "logprobs", "cache_salt", "heads", "isolation_steps", "grammar", "adapter_start", "tenant", "learning_tenant", "num_virtual", "composition", "caller", "share", "num_held", "pooling")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_EMITTED_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_IDS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_STEPS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_START_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LEARNING_TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_VIRTUAL_FIELD_NUMBER: _ClassVar[int]
    COMPOSITION_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    id: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    num_emitted: int
    max_new_tokens: int
    seed: int
    sampling: Sampling
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    adapter: AdapterPin
    speculation: Speculation
    prediction_ids: _containers.RepeatedScalarFieldContainer[int]
    deadline_ms: int
    logprobs: Logprobs
    cache_salt: str
    heads: AdapterPin
    isolation_steps: int
    grammar: Grammar
    adapter_start: int
    tenant: str
    learning_tenant: str
    num_virtual: int
    composition: Composition
    caller: str
    share: float
    num_held: int
    pooling: Pooling
    def __init__(self, id: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., num_emitted: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stop_ids: _Optional[_Iterable[int]] = ..., adapter: _Optional[_Union[AdapterPin, _Mapping]] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., prediction_ids: _Optional[_Iterable[int]] = ..., deadline_ms: _Optional[int] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., cache_salt: _Optional[str] = ..., heads: _Optional[_Union[AdapterPin, _Mapping]] = ..., isolation_steps: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., adapter_start: _Optional[int] = ..., tenant: _Optional[str] = ..., learning_tenant: _Optional[str] = ..., num_virtual: _Optional[int] = ..., composition: _Optional[_Union[Composition, _Mapping]] = ..., caller: _Optional[str] = ..., share: _Optional[float] = ..., num_held: _Optional[int] = ..., pooling: _Optional[_Union[Pooling, _Mapping]] = ...) -> None: ...

class Composition(_message.Message):
    __slots__ = ("digests", "shrink_weights", "expand_weights", "shares_factors")
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    SHRINK_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    EXPAND_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FACTORS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    shrink_weights: _containers.RepeatedScalarFieldContainer[float]
    expand_weights: _containers.RepeatedScalarFieldContainer[float]
    shares_factors: bool
    def __init__(self, digests: _Optional[_Iterable[str]] = ..., shrink_weights: _Optional[_Iterable[float]] = ..., expand_weights: _Optional[_Iterable[float]] = ..., shares_factors: _Optional[bool] = ...) -> None: ...

class Pooling(_message.Message):
    __slots__ = ("task", "second_text", "per_token")
    TASK_FIELD_NUMBER: _ClassVar[int]
    SECOND_TEXT_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    task: str
    second_text: int
    per_token: bool
    def __init__(self, task: _Optional[str] = ..., second_text: _Optional[int] = ..., per_token: _Optional[bool] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("text", "proposes")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PROPOSES_FIELD_NUMBER: _ClassVar[int]
    text: str
    proposes: bool
    def __init__(self, text: _Optional[str] = ..., proposes: _Optional[bool] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "bias_ids", "bias_values", "watermark", "allowed_ids", "bad_words", "min_tokens", "min_tokens_stop_ids")
    DO_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    bias_ids: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    watermark: bool
    allowed_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    min_tokens: int
    min_tokens_stop_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, do_sample: _Optional[bool] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., typical_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., bias_ids: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., watermark: _Optional[bool] = ..., allowed_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., min_tokens: _Optional[int] = ..., min_tokens_stop_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("wanted", "alternatives", "prefill", "mode", "prefill_alternatives", "prefill_ranks", "alternative_ids")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PROCESSED: _ClassVar[Logprobs.Mode]
        RAW: _ClassVar[Logprobs.Mode]
    PROCESSED: Logprobs.Mode
    RAW: Logprobs.Mode
    WANTED_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RANKS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVE_IDS_FIELD_NUMBER: _ClassVar[int]
    wanted: bool
    alternatives: int
    prefill: bool
    mode: Logprobs.Mode
    prefill_alternatives: int
    prefill_ranks: bool
    alternative_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, wanted: _Optional[bool] = ..., alternatives: _Optional[int] = ..., prefill: _Optional[bool] = ..., mode: _Optional[_Union[Logprobs.Mode, str]] = ..., prefill_alternatives: _Optional[int] = ..., prefill_ranks: _Optional[bool] = ..., alternative_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("method", "num_tokens", "schedule", "verify", "num_heads")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    method: str
    num_tokens: int
    schedule: str
    verify: str
    num_heads: int
    def __init__(self, method: _Optional[str] = ..., num_tokens: _Optional[int] = ..., schedule: _Optional[str] = ..., verify: _Optional[str] = ..., num_heads: _Optional[int] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("step", "credit", "heartbeat", "adapters", "columns", "outputs", "load", "step_requests", "step_detail", "learning")
    STEP_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STEP_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    STEP_DETAIL_FIELD_NUMBER: _ClassVar[int]
    LEARNING_FIELD_NUMBER: _ClassVar[int]
    step: int
    credit: Credit
    heartbeat: Heartbeat
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterState]
    columns: _containers.RepeatedCompositeFieldContainer[TokenColumns]
    outputs: _containers.RepeatedCompositeFieldContainer[RequestOutput]
    load: Load
    step_requests: StepRequests
    step_detail: StepDetail
    learning: LearningTotals
    def __init__(self, step: _Optional[int] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., adapters: _Optional[_Iterable[_Union[AdapterState, _Mapping]]] = ..., columns: _Optional[_Iterable[_Union[TokenColumns, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[RequestOutput, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., step_requests: _Optional[_Union[StepRequests, _Mapping]] = ..., step_detail: _Optional[_Union[StepDetail, _Mapping]] = ..., learning: _Optional[_Union[LearningTotals, _Mapping]] = ...) -> None: ...

class LearningTotals(_message.Message):
    __slots__ = ("num_rows", "num_adopted", "num_rejected", "num_reverted", "num_failed", "ring_bytes", "train_seconds", "cpu_seconds")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_ADOPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_REJECTED_FIELD_NUMBER: _ClassVar[int]
    NUM_REVERTED_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    RING_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    num_adopted: int
    num_rejected: int
    num_reverted: int
    num_failed: int
    ring_bytes: int
    train_seconds: float
    cpu_seconds: float
    def __init__(self, num_rows: _Optional[int] = ..., num_adopted: _Optional[int] = ..., num_rejected: _Optional[int] = ..., num_reverted: _Optional[int] = ..., num_failed: _Optional[int] = ..., ring_bytes: _Optional[int] = ..., train_seconds: _Optional[float] = ..., cpu_seconds: _Optional[float] = ...) -> None: ...

class LearningRequest(_message.Message):
    __slots__ = ("purge",)
    PURGE_FIELD_NUMBER: _ClassVar[int]
    purge: bool
    def __init__(self, purge: _Optional[bool] = ...) -> None: ...

class LearningReply(_message.Message):
    __slots__ = ("max_bytes", "totals", "trainer", "training_s", "pairs")
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    TRAINING_S_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    max_bytes: int
    totals: LearningTotals
    trainer: str
    training_s: float
    pairs: _containers.RepeatedCompositeFieldContainer[LearnedPair]
    def __init__(self, max_bytes: _Optional[int] = ..., totals: _Optional[_Union[LearningTotals, _Mapping]] = ..., trainer: _Optional[str] = ..., training_s: _Optional[float] = ..., pairs: _Optional[_Iterable[_Union[LearnedPair, _Mapping]]] = ...) -> None: ...

class LearnedPair(_message.Message):
    __slots__ = ("tenant", "adapter_digest", "num_rows", "num_collected", "heads_digest", "replaced_digest", "acceptance", "replaced_acceptance", "decisions")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_COLLECTED_FIELD_NUMBER: _ClassVar[int]
    HEADS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REPLACED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    REPLACED_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    adapter_digest: str
    num_rows: int
    num_collected: int
    heads_digest: str
    replaced_digest: str
    acceptance: float
    replaced_acceptance: float
    decisions: _containers.RepeatedCompositeFieldContainer[LearningDecision]
    def __init__(self, tenant: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., num_rows: _Optional[int] = ..., num_collected: _Optional[int] = ..., heads_digest: _Optional[str] = ..., replaced_digest: _Optional[str] = ..., acceptance: _Optional[float] = ..., replaced_acceptance: _Optional[float] = ..., decisions: _Optional[_Iterable[_Union[LearningDecision, _Mapping]]] = ...) -> None: ...

class LearningDecision(_message.Message):
    __slots__ = ("time", "decision", "reason", "heads_digest", "tokens_per_step", "tokens_per_step_before", "num_rows", "seconds")
    TIME_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HEADS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_STEP_BEFORE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    time: float
    decision: str
    reason: str
    heads_digest: str
    tokens_per_step: float
    tokens_per_step_before: float
    num_rows: int
    seconds: float
    def __init__(self, time: _Optional[float] = ..., decision: _Optional[str] = ..., reason: _Optional[str] = ..., heads_digest: _Optional[str] = ..., tokens_per_step: _Optional[float] = ..., tokens_per_step_before: _Optional[float] = ..., num_rows: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class StepDetail(_message.Message):
    __slots__ = ("ids", "num_tokens", "num_drafts", "preempted_ids")
    IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_drafts: _containers.RepeatedScalarFieldContainer[int]
    preempted_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., num_drafts: _Optional[_Iterable[int]] = ..., preempted_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StepRequests(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("num_requests", "num_kv_tokens", "acknowledged")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    num_kv_tokens: int
    acknowledged: int
    def __init__(self, num_requests: _Optional[int] = ..., num_kv_tokens: _Optional[int] = ..., acknowledged: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("running_step", "age_ms")
    RUNNING_STEP_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    running_step: int
    age_ms: int
    def __init__(self, running_step: _Optional[int] = ..., age_ms: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "used_pages", "cached_pages", "num_preempted", "step_ms", "step_tokens", "expected_ms", "gap_us", "is_stalled")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    USED_PAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_MS_FIELD_NUMBER: _ClassVar[int]
    GAP_US_FIELD_NUMBER: _ClassVar[int]
    IS_STALLED_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    used_pages: int
    cached_pages: int
    num_preempted: int
    step_ms: int
    step_tokens: int
    expected_ms: int
    gap_us: int
    is_stalled: bool
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., used_pages: _Optional[int] = ..., cached_pages: _Optional[int] = ..., num_preempted: _Optional[int] = ..., step_ms: _Optional[int] = ..., step_tokens: _Optional[int] = ..., expected_ms: _Optional[int] = ..., gap_us: _Optional[int] = ..., is_stalled: _Optional[bool] = ...) -> None: ...

class AdapterState(_message.Message):
    __slots__ = ("digest", "residency", "reason")
    class Residency(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ABSENT: _ClassVar[AdapterState.Residency]
        LOADING: _ClassVar[AdapterState.Residency]
        RESIDENT: _ClassVar[AdapterState.Residency]
        FAILED: _ClassVar[AdapterState.Residency]
        HOST_MEMORY: _ClassVar[AdapterState.Residency]
    ABSENT: AdapterState.Residency
    LOADING: AdapterState.Residency
    RESIDENT: AdapterState.Residency
    FAILED: AdapterState.Residency
    HOST_MEMORY: AdapterState.Residency
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    digest: str
    residency: AdapterState.Residency
    reason: str
    def __init__(self, digest: _Optional[str] = ..., residency: _Optional[_Union[AdapterState.Residency, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class TokenColumns(_message.Message):
    __slots__ = ("ids", "token_ids", "logprobs", "alternative_ids", "alternative_logprobs", "num_tokens", "sources", "num_drafted", "num_accepted", "draft_sources", "seconds")
    IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVE_IDS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SOURCES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    alternative_ids: _containers.RepeatedScalarFieldContainer[int]
    alternative_logprobs: _containers.RepeatedScalarFieldContainer[float]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    sources: bytes
    num_drafted: _containers.RepeatedScalarFieldContainer[int]
    num_accepted: _containers.RepeatedScalarFieldContainer[int]
    draft_sources: bytes
    seconds: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., alternative_ids: _Optional[_Iterable[int]] = ..., alternative_logprobs: _Optional[_Iterable[float]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., sources: _Optional[bytes] = ..., num_drafted: _Optional[_Iterable[int]] = ..., num_accepted: _Optional[_Iterable[int]] = ..., draft_sources: _Optional[bytes] = ..., seconds: _Optional[_Iterable[float]] = ...) -> None: ...

class RequestOutput(_message.Message):
    __slots__ = ("id", "token_ids", "sources", "logprobs", "alternative_ids", "alternative_logprobs", "num_drafted", "num_accepted", "num_cached_tokens", "finish_reason", "error", "prefill_logprobs", "prefill_alternative_ids", "prefill_alternative_logprobs", "step_ends", "retryable", "draft_seconds", "verify_seconds", "accept_seconds", "prefill_ranks", "in_step", "pooled")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVE_IDS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ALTERNATIVE_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ALTERNATIVE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STEP_ENDS_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RANKS_FIELD_NUMBER: _ClassVar[int]
    IN_STEP_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sources: bytes
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    alternative_ids: _containers.RepeatedScalarFieldContainer[int]
    alternative_logprobs: _containers.RepeatedScalarFieldContainer[float]
    num_drafted: _containers.RepeatedScalarFieldContainer[int]
    num_accepted: int
    num_cached_tokens: int
    finish_reason: FinishReason
    error: str
    prefill_logprobs: _containers.RepeatedScalarFieldContainer[float]
    prefill_alternative_ids: _containers.RepeatedScalarFieldContainer[int]
    prefill_alternative_logprobs: _containers.RepeatedScalarFieldContainer[float]
    step_ends: bytes
    retryable: bool
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float
    prefill_ranks: _containers.RepeatedScalarFieldContainer[int]
    in_step: bool
    pooled: bytes
    def __init__(self, id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., sources: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[float]] = ..., alternative_ids: _Optional[_Iterable[int]] = ..., alternative_logprobs: _Optional[_Iterable[float]] = ..., num_drafted: _Optional[_Iterable[int]] = ..., num_accepted: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., error: _Optional[str] = ..., prefill_logprobs: _Optional[_Iterable[float]] = ..., prefill_alternative_ids: _Optional[_Iterable[int]] = ..., prefill_alternative_logprobs: _Optional[_Iterable[float]] = ..., step_ends: _Optional[bytes] = ..., retryable: _Optional[bool] = ..., draft_seconds: _Optional[float] = ..., verify_seconds: _Optional[float] = ..., accept_seconds: _Optional[float] = ..., prefill_ranks: _Optional[_Iterable[int]] = ..., in_step: _Optional[bool] = ..., pooled: _Optional[bytes] = ...) -> None: ...
