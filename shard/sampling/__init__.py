"""From logits to tokens: each request by its own parameters, one batch at a time."""

from lorikeet.shard.sampling.report import HostPromptLogprobs, HostSampled, PromptLogprobs, Sampled, SampledColumns
from lorikeet.shard.sampling.sampler import Sampler

__all__ = ["HostPromptLogprobs", "HostSampled", "PromptLogprobs", "Sampled", "SampledColumns", "Sampler"]
