"""`POST /predict`: from a prompt to a text, in the format of LLMSpeculativeSampling's server.

Constants of that server are defaults here; every other field is one of `/generate`'s parameters.
"""

from dataclasses import replace
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from lorikeet.router.api.alias_defaults import native_defaults
from lorikeet.router.api.routes.native import NativeRoutes
from lorikeet.router.api.service import Service, now
from lorikeet.router.errors import UnsupportedField, ValidationError
from lorikeet.router.schemas.body import read_json
from lorikeet.router.schemas.fields import Fields
from lorikeet.router.schemas.native import NativeRequest, read_native

DEFAULTS: dict[str, Any] = {"max_new_tokens": 40, "top_k": 10, "top_p": 0.9, "return_full_text": True}
DEFAULT_TOKENS = 4
"""Draft tokens per step, where the server allows as many."""
_UNSUPPORTED = ("details", "decoder_input_details", "receipt", "stream")
"""Fields that ask for more than a text."""


class PredictRoute:
    """The handler, which differs from `/generate` in the format of body and answer only."""

    def __init__(self, service: Service, native: NativeRoutes) -> None:
        self._service = service
        self._native = native

    async def predict(self, request: Request) -> Response:
        """Answers with a JSON string: the prompt and the generated text."""
        arrived_at = now()
        body = await read_json(request, self._service.config.max_body_bytes)
        answer, headers = await self._native.answered(request, self._read(body), arrived_at)
        return Response(orjson.dumps(answer["generated_text"]), headers=headers, media_type="application/json")

    def _read(self, body: dict[str, Any]) -> NativeRequest:
        if not Fields(body).required_text("prompt"):
            raise ValidationError("`prompt` cannot be empty", "prompt")
        parameters = {name: value for name, value in body.items() if name != "prompt"}
        for name in _UNSUPPORTED:
            if parameters.pop(name, None) not in (None, False):
                raise UnsupportedField(name, "is not supported by this route, whose answer is only a text")
        filled = native_defaults({"parameters": parameters}, self._service.selection)["parameters"]
        most = self._service.config.speculative_tokens_max
        defaults = {**DEFAULTS, "speculative_tokens": min(DEFAULT_TOKENS, most)}
        filled = {**defaults, **{name: value for name, value in filled.items() if value is not None}}
        native = read_native({"inputs": body["prompt"], "parameters": filled}, with_stream=False)
        return replace(native, ignored=[name.removeprefix("parameters.") for name in native.ignored])
