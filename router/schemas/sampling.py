"""Fields of every generation route that say how tokens are sampled."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from lorikeet.proto.params import LOGIT_BIAS_RANGE, SamplingParams, ranges
from lorikeet.router.errors import ValidationError
from lorikeet.router.schemas.model import F32, I32, Body, Rejected, Rule

MAX_BIASES = 1024
_RANGES = ranges(SamplingParams)
_PENALTY_RULE = Rule(f"must be {_RANGES['repetition_penalty']}", not_positive="must be strictly positive")
_BEAMS = "is of beam search, which this server does not support"


def _check_num_biases(value: Any) -> Any:
    """Before the values, whatever they are."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValidationError(f"`logit_bias` supports up to {MAX_BIASES} tokens. Given: {len(value)}", "logit_bias")
    return value


def _check_biases(biases: dict[str, float]) -> dict[str, float]:
    for name, bias in biases.items():
        if not (name.isascii() and name.isdigit() and len(name) <= 9):
            raise ValidationError("`logit_bias` must map token ids to numbers", "logit_bias")
        if bias not in LOGIT_BIAS_RANGE:
            raise ValidationError("`logit_bias` values must be >= -100 and <= 100", "logit_bias")
    return biases


def _within(name: str, default: float) -> Any:
    """A field with the range of the parameter of that name."""
    bounds: dict[str, Any] = {**_RANGES[name].bounds}
    return Field(default, **bounds)


class SamplingGroup(Body):
    """LoRAX checks them in this order. Ranges of its own routes and of OpenAI's differ: their bodies narrow these."""

    temperature: F32 = 1.0
    repetition_penalty: Annotated[F32, _PENALTY_RULE] = _within("repetition_penalty", 1.0)
    frequency_penalty: F32 = _within("frequency_penalty", 0.0)
    presence_penalty: F32 = _within("presence_penalty", 0.0)
    top_p: F32 = 1.0
    min_p: F32 = _within("min_p", 0.0)
    typical_p: F32 = 1.0
    top_k: I32 = 0
    do_sample: bool = False
    logit_bias: Annotated[dict[str, F32], BeforeValidator(_check_num_biases), AfterValidator(_check_biases)] = Field(
        default_factory=dict, description=f"By token id, -100 to 100; at most {MAX_BIASES}"
    )
    use_beam_search = Rejected(neutral=(False,))
    length_penalty = Rejected(_BEAMS, (1.0,))
    custom_logit_processor = Rejected(neutral=("",))

    def sampled(self, *, do_sample: bool, watermark: bool = False) -> SamplingParams:
        """A temperature of 0 is greedy."""
        return SamplingParams(
            do_sample=do_sample and self.temperature > 0.0,
            temperature=self.temperature or 1.0,
            # The empty nucleus keeps the likeliest token.
            top_k=1 if self.top_p == 0.0 else max(self.top_k, 0),
            top_p=self.top_p or 1.0,
            min_p=self.min_p,
            typical_p=self.typical_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            watermark=watermark,
            logit_bias=tuple((int(token_id), bias) for token_id, bias in self.logit_bias.items()),
        )
