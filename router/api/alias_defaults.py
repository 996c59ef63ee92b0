"""Fills an alias's default parameters into the body of a request, for LoRAX's and for OpenAI's routes."""

from typing import Any

from lorikeet.adapters.catalogue import Entry
from lorikeet.router.adapters.selection import Selection
from lorikeet.router.schemas.speculation import DEPRECATED_FIELDS, excludes_heads

_NOT_OPENAI = ("do_sample", "return_full_text", "truncate")
"""Parameters that OpenAI's routes don't have."""


def native_defaults(body: dict[str, Any], selection: Selection) -> dict[str, Any]:
    """Of a body of LoRAX's routes. Invalid bodies are returned as they are; the reader rejects them."""
    given = body.get("parameters")
    parameters = {} if given is None else given
    if not isinstance(parameters, dict) or parameters.get("merged_adapters") is not None:
        return body
    entry = _entry(parameters.get("adapter_id"), parameters, selection)
    if entry is None or not entry.parameters:
        return body
    return {**body, "parameters": _filled(parameters, dict(entry.parameters))}


def openai_defaults(body: dict[str, Any], selection: Selection) -> dict[str, Any]:
    """Of a body of OpenAI's routes."""
    entry = _entry(body.get("model"), body, selection)
    if entry is None or not entry.parameters:
        return body
    defaults = {name: value for name, value in entry.parameters if name not in _NOT_OPENAI}
    if "max_new_tokens" in defaults:
        longest = defaults.pop("max_new_tokens")
        if body.get("max_completion_tokens") is None:
            defaults["max_tokens"] = longest
    return _filled(body, defaults)


def _entry(name: Any, fields: dict[str, Any], selection: Selection) -> Entry | None:
    source = fields.get("adapter_source")
    if not isinstance(name, str | None) or not isinstance(source, str | None) or selection.is_base(name):
        return None
    return selection.entry(name, source)


def _filled(fields: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Null counts as absent. `heads_id` is no default of a request whose method or draft length excludes heads."""
    if excludes_heads(fields.get("speculative_method"), fields.get("speculative_tokens")):
        defaults.pop("heads_id", None)
    given = {DEPRECATED_FIELDS.get(name, name) for name, value in fields.items() if value is not None}
    missing = {name: value for name, value in defaults.items() if DEPRECATED_FIELDS.get(name, name) not in given}
    return {**fields, **missing}
