"""`/v1/capabilities`: what the caller may ask for, and its limits, for the controls of a page."""

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from lorikeet.proto.draft_sources import BY_VALUE
from lorikeet.proto.params import MAX_ALTERNATIVES
from lorikeet.router.api.service import Service
from lorikeet.router.kept_streams import MAX_TTL_S


class CapabilityRoutes:
    """The handler."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def show(self, request: Request) -> Response:
        """Limits and offers; nothing about other callers."""
        service = self._service
        config, info, offer, caller = service.config, service.dispatcher.info, service.offer, service.caller(request)
        key, heads = caller.key, service.selection.directory.default_heads
        keys = service.selection.keys
        has_keys = bool(keys) or keys.has_admin
        content: dict[str, Any] = {
            "model": config.model_name,
            "version": None if info is None else info.version,
            "device": None if info is None else info.device,
            "max_input_length": config.max_input_length,
            "max_total_tokens": config.max_total_tokens,
            "max_stop_sequences": config.max_stop_sequences,
            "max_alternatives": MAX_ALTERNATIVES,
            "adapters": service.dispatcher.admission is not None,
            "chat": bool(service.tokenizer.information.get("chat_template")),
            "grammars": info is not None and info.grammars,
            "speculation": {
                "method": offer.method,
                "default_tokens": offer.num_tokens,
                "max_tokens": offer.max_tokens,
                "draft_model": offer.has_draft_model,
                "heads": heads is not None and service.selection.access.may_use(heads.entry, key),
                "history": offer.has_history and bool(caller.tenant(None)),
                "default_history": offer.history,
                "sources": [row.name for row in BY_VALUE.values()],
            },
            "resumable_ttl": MAX_TTL_S,
            "key": None if key is None else key.name,
            "has_keys": has_keys,
            "may_watch": not has_keys or (key is not None and key.admin),
        }
        return Response(orjson.dumps(content), media_type="application/json")
