"""`/admin/learning`: what shards learn from traffic, and its deletion. Needs the admin key."""

import asyncio
from typing import Any

import grpc
import orjson
from google.protobuf.json_format import MessageToDict
from starlette.requests import Request
from starlette.responses import Response

from lorikeet.adapters.keys import Keys
from lorikeet.router.api.routes.admin import AdminRoutes
from lorikeet.router.api.service import Service
from lorikeet.router.errors import NoShard
from lorikeet.router.requests.caller import Caller
from lorikeet.router.shards.link import ShardLink


class LearningRoutes:
    """The handlers."""

    def __init__(self, service: Service, admin: AdminRoutes) -> None:
        self._service, self._admin = service, admin

    async def show(self, request: Request) -> Response:
        """What every shard collects, trains and adopts, with its decisions."""
        return await self._answer(request, purge=False)

    async def purge(self, request: Request) -> Response:
        """Delete all rows, learned heads and decisions of every shard. Raises NoShard where one cannot be reached."""
        return await self._answer(request, purge=True)

    async def _answer(self, request: Request, purge: bool) -> Response:
        self._admin.check(request)
        links = [link for link in self._service.dispatcher.links if link.info is not None]
        if purge and any(not link.client.connected for link in self._service.dispatcher.links):
            raise NoShard
        shards = await asyncio.gather(*(self._of(link, purge) for link in links))
        return Response(orjson.dumps({"purged": purge, "shards": shards}), media_type="application/json")

    async def _of(self, link: ShardLink, purge: bool) -> dict[str, Any]:
        shown = {"shard": link.address}
        assert link.info is not None
        if not link.info.learning:
            return shown | {"enabled": False}
        try:
            reply = await link.client.learning(purge)
        except (grpc.aio.AioRpcError, ConnectionError):
            raise NoShard from None
        values = MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        names = _key_names(self._service.selection.keys)
        adapters = {each.digest: name for name, each in self._service.admission.loading.contents()}
        for pair in values["pairs"]:
            pair["key"] = names.get(pair["tenant"])
            pair["adapter"] = adapters.get(pair["adapter_digest"])
        return shown | {"enabled": True} | values


def _key_names(keys: Keys) -> dict[str, str]:
    """Names of API keys by their tenants."""
    return {Caller("", key).tenant(None): key.name for key in keys}
