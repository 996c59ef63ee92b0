"""`POST /predict`: a prompt in, a text out, as the serving script of LLMSpeculativeSampling has it.

What that script fixes are defaults here; every other field is one of `/generate`'s parameters. Knows no shape but this.
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
"""SpeculationStats per step, where the server allows as many."""
_NO_PLACE = ("details", "decoder_input_details", "receipt", "stream")
"""Fields that ask for more than a text."""


class PredictRoute:
    """The handler; all but the shape of body and answer is `/generate`'s."""

    def __init__(self, service: Service, native: NativeRoutes) -> None:
        self._service = service
        self._native = native

    async def predict(self, request: Request) -> Response:
        """A bare JSON string: the prompt and what follows it."""
        arrived_at = now()
        body = await read_json(request, self._service.config.max_body_bytes)
        answer, headers = await self._native.answered(request, self._read(body), arrived_at)
        return Response(orjson.dumps(answer["generated_text"]), headers=headers, media_type="application/json")

    def _read(self, body: dict[str, Any]) -> NativeRequest:
        if not Fields(body).required_text("prompt"):
            raise ValidationError("`prompt` cannot be empty", "prompt")
        parameters = {name: value for name, value in body.items() if name != "prompt"}
        for name in _NO_PLACE:
            if parameters.pop(name, None) not in (None, False):
                raise UnsupportedField(name, "has no place in this route's answer, which is a text")
        filled = native_defaults({"parameters": parameters}, self._service.selection)["parameters"]
        most = self._service.config.speculative_tokens_max
        defaults = {**DEFAULTS, "speculative_tokens": min(DEFAULT_TOKENS, most)}
        filled = {**defaults, **{name: value for name, value in filled.items() if value is not None}}
        native = read_native({"inputs": body["prompt"], "parameters": filled}, with_stream=False)
        return replace(native, ignored=[name.removeprefix("parameters.") for name in native.ignored])
