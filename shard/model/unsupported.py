"""What cannot be served, told from a checkpoint's configuration alone: one sentence with the reason.

Knows names of configuration fields; what a configuration cannot tell is left to the probe.
"""

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

SERVED_LAYERS = {"full_attention", "sliding_attention", "attention"}


def reject_unservable(checkpoint: Any) -> None:
    """Raise ValueError when a model of this configuration cannot be served."""
    reason = reason_against(checkpoint)
    if reason is not None:
        raise ValueError(f"cannot serve {checkpoint.model_type}: {reason}")


def reason_against(checkpoint: Any) -> str | None:
    """Why a model of this configuration cannot be served, or None."""
    if getattr(checkpoint, "is_encoder_decoder", False):
        return "it is an encoder-decoder, and only decoders are served"
    for name, kind in (("vision_config", "images"), ("audio_config", "audio")):
        if getattr(checkpoint, name, None) is not None:
            return f"it takes {kind}, and only text models are served"
    text = checkpoint.get_text_config()
    other = set(getattr(text, "layer_types", None) or ()) - SERVED_LAYERS
    if other:
        return f"it has layers other than full and sliding attention ({', '.join(sorted(other))})"
    if getattr(text, "attention_chunk_size", None):
        return "its attention works in chunks, which are not served"
    remote = getattr(checkpoint, "auto_map", None) or {}
    if type(checkpoint) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in remote:
        return "transformers knows no causal language model of this kind"
    return None
