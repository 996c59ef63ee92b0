"""Routes of administrators: list, load, pin, unload and refresh adapters, reload the catalogue, and vLLM's two routes.

All answer 403 without the admin key, and where the server has none.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from lorikeet.adapters import refs
from lorikeet.adapters.catalogue import CatalogueEntry
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.keys import Keys
from lorikeet.adapters.refs import Ref
from lorikeet.router.adapters.loading import AdapterAdmission
from lorikeet.router.adapters.selection import MAX_ADDED, single
from lorikeet.router.api.answer_parts import json_response
from lorikeet.router.api.service import Routes
from lorikeet.router.errors import (
    AdminOnly,
    AlreadyLoaded,
    LoraNotFound,
    ModelNotFound,
    NoShard,
    ReloadRefused,
    RouteNotServed,
    ValidationError,
    adapter_problem,
)
from lorikeet.router.requests.request import Adapter, Caller, Loaded, offered
from lorikeet.router.schemas.adapters import (
    BASE_NAMES,
    AdapterName,
    AdapterRefresh,
    AdapterUnload,
    LoadLora,
    SageMakerAdapter,
    UnloadLora,
)
from lorikeet.router.schemas.model import BodyType
from lorikeet.router.shards.link import ShardLink

_UNLOAD_S = 300.0


class AdminRoutes(Routes):
    """The handlers. Adapters are named as in requests: an alias, or an id with its source."""

    async def listing(self, request: Request) -> Response:
        """Every name that the operator gave, and every loaded content with its place."""
        self.check(request)
        admission, directory = self._service.admission, self._service.selection.directory
        named = [
            {
                "alias": line.alias,
                "problem": line.problem or None,
                "pin": line.entry is not None and line.entry.pin,
                "weight": None if line.entry is None else line.entry.weight,
                "adapters": [] if line.entry is None else [_shown(version.ref) for version in line.entry.versions],
            }
            for line in directory.listed()
        ]
        loaded = [
            {
                "adapter": content,
                "digest": stored.digest,
                "num_bytes": stored.num_bytes,
                "rank": stored.rank,
                "num_heads": stored.num_heads,
                "resident": admission.is_resident(stored.digest),
                "pinned": stored.digest in admission.pinned,
            }
            for content, stored in admission.loading.contents()
        ]
        return json_response({"named": named, "loaded": loaded})

    async def load(self, request: Request) -> Response:
        """Load an adapter, into shards too, before it is requested."""
        return await self._each_content(request, "loaded", AdapterAdmission.prefetch)

    async def pin(self, request: Request) -> Response:
        """Load an adapter and keep it loaded."""
        return await self._each_content(request, "pinned", AdapterAdmission.pin)

    async def unpin(self, request: Request) -> Response:
        """Allow the eviction of an adapter."""
        return await self._each_content(request, "unpinned", lambda admission, digest, _: admission.unpin(digest))

    async def unload(self, request: Request) -> Response:
        """Free its memory once requests in flight are done; with `disk` delete its file too. 404 if there is none."""
        body = await self._read(request, AdapterUnload)
        name, (entry, refs) = body.adapter_id, self._named(body.adapter_id, body.adapter_source)
        digests = self._service.admission.loading.digests(refs)
        if not digests:
            await self._check_exists(entry)
        await self._unload(digests, body.disk)
        return json_response({"adapter_id": name, "unloaded": sorted(digests)})

    async def refresh(self, request: Request) -> Response:
        """Query the sources again at the next request: for one adapter, 404 if there is none, or without a name for
        all.
        """
        body = await self._read(request, AdapterRefresh)
        if (name := body.adapter_id) is None:
            self._service.rights.forget()
            return json_response({"refreshed": "all"})
        entry, refs = self._named(name, body.adapter_source)
        known = [self._service.rights.forget(ref) for ref in refs]
        if not any(known) and not self._service.admission.loading.digests(refs):
            await self._check_exists(entry)
        return json_response({"adapter_id": name, "refreshed": [_shown(ref) for ref in refs]})

    async def reload(self, request: Request) -> Response:
        """Reload the operator's files, all or none."""
        self.check(request)
        changed = await self._service.reloading.reload()
        return json_response({"num_entries": changed.num_entries, "num_changed": changed.num_changed})

    async def load_lora_adapter(self, request: Request) -> Response:
        """vLLM's route: `lora_name` becomes an alias of `lora_path`."""
        body = await self._read(request, LoadLora)
        name, path = body.lora_name, body.lora_path
        if not name or not path:
            raise ValidationError("Both 'lora_name' and 'lora_path' must be provided.", "lora_name")
        if name in BASE_NAMES or (
            name in self._service.config.model_names and not self._service.config.allow_base_model_name
        ):
            problem = f"`lora_name` must not be a name of the base model without --allow-base-model-name: {name[:256]}"
            raise ValidationError(problem, "lora_name")
        try:
            refs.check_alias(name)
        except ValueError as error:
            raise ValidationError(f"`lora_name` {name[:60]!r} is not a name: {error}", "lora_name") from None
        directory = self._service.selection.directory
        if directory.find(name) is not None and not body.load_inplace:
            raise AlreadyLoaded(name)
        if directory.is_full and directory.find(name) is None:
            problem = f"{MAX_ADDED} adapters were added by this route: unload one, or list them in --adapters"
            raise ValidationError(problem, "lora_name")
        entry = single(name, self._path_ref(path))
        await self._contents(entry)
        directory.add(entry)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_lora_adapter(self, request: Request) -> Response:
        """vLLM's route: remove the alias at once, and free its memory once requests in flight are done."""
        name = (await self._read(request, UnloadLora)).lora_name
        if not name:
            raise ValidationError("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
        await self._remove(name, LoraNotFound(name[:256]))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def delete_model(self, request: Request) -> Response:
        """OpenAI's route: the same for the name in the path."""
        self.check(request)
        name = request.path_params["model_id"]
        if self._service.selection.is_base(name):
            raise ValidationError("the base model cannot be deleted", "model")
        await self._remove(name, ModelNotFound(name[:256]))
        return json_response({"id": name, "object": "model", "deleted": True})

    async def load_sagemaker_adapter(self, request: Request) -> Response:
        """SageMaker's route: `name` becomes an alias of `src`."""
        self.check(request)
        body = SageMakerAdapter.read(await self._service.body(request))
        request.state.given_body = {"lora_name": body.name, "lora_path": body.src, "load_inplace": body.load_inplace}
        return await self.load_lora_adapter(request)

    async def unload_sagemaker_adapter(self, request: Request) -> Response:
        """SageMaker's route: remove the alias of the path."""
        request.state.given_body = {"lora_name": request.path_params["adapter_name"]}
        return await self.unload_lora_adapter(request)

    async def _remove(self, name: str, missing: ModelNotFound) -> None:
        """Raises `missing` where there is no such alias."""
        directory = self._service.selection.directory
        entry = directory.find(name)
        if entry is None:
            raise missing
        digests = self._service.admission.loading.digests([version.ref for version in entry.versions])
        directory.remove(name)
        await self._unload(digests, disk=False)

    def check(self, request: Request) -> None:
        """Raises AdminOnly for everyone but administrators."""
        keys = self._service.selection.keys
        if not keys.has_admin:
            raise AdminOnly(
                "administration is disabled: start the server with --admin-key-file FILE or the variable ADMIN_KEY"
            )
        is_wrong = any(key is not None for key in offered(request))
        reason = "the key that was sent is not an admin key" if is_wrong else "this route needs the admin key"
        refusal = AdminOnly(f"{reason}: send the admin key as Authorization: Bearer KEY")
        self._service.authentication.check_admin(request, refusal)
        if self._service.dispatcher.admission is None:
            raise RouteNotServed(request.url.path)

    async def _read(self, request: Request, kind: type[BodyType]) -> BodyType:
        self.check(request)
        is_empty = request.headers.get("content-length") == "0"
        return kind.read({} if is_empty else await self._service.body(request))

    def _named(self, name: str, source: str | None) -> tuple[CatalogueEntry, list[Ref]]:
        """The entry of a name in a body, and all its versions."""
        entry = self._entry(name, source)
        return entry, [version.ref for version in entry.versions]

    async def _check_exists(self, entry: CatalogueEntry) -> None:
        """Raises AdapterProblem if the entry is not the operator's, and its source has no such adapter."""
        if self._service.selection.directory.find(entry.alias) is entry:
            return
        try:
            for version in entry.versions:
                await self._service.selection.opened(entry, version.ref)
        except AdapterError as error:
            raise adapter_problem(error) from None

    def _entry(self, name: str, source: str | None) -> CatalogueEntry:
        selection = self._service.selection
        entry = selection.entry(name, source) if name else None
        if entry is not None:
            return entry
        try:
            return single(name, refs.parse(name, selection.source(source)))
        except ValueError as error:
            raise ValidationError(str(error), "adapter_id") from None

    def _path_ref(self, path: str) -> Ref:
        """vLLM's path: a local folder where it starts with `/`, else an id as in requests."""
        source = refs.SourceKind.LOCAL if path.startswith("/") else self._service.selection.source(None)
        try:
            return refs.parse(path, source)
        except ValueError as error:
            raise ValidationError(str(error), "lora_path") from None

    async def _each_content(
        self, request: Request, key: str, act: Callable[[AdapterAdmission, str, Adapter], object]
    ) -> Response:
        """Load all versions of the adapter in the body and `act` on each content; lists them as `key`."""
        body = await self._read(request, AdapterName)
        name = body.adapter_id
        contents = await self._contents(self._entry(name, body.adapter_source))
        for content, adapter in contents:
            act(self._service.admission, content.digest, adapter)
        shown = [
            {"digest": content.digest, "num_bytes": content.num_bytes, "rank": content.rank} for content, _ in contents
        ]
        return json_response({"adapter_id": name, key: shown})

    async def _contents(self, entry: CatalogueEntry) -> list[tuple[Loaded, Adapter]]:
        """(content, adapter) of all versions, loaded. Raises AdapterProblem."""
        try:
            adapters = [await self._service.selection.opened(entry, version.ref) for version in entry.versions]
            return [(await self._service.admission.content(adapter), adapter) for adapter in adapters]
        except AdapterError as error:
            raise adapter_problem(error) from None

    async def _unload(self, digests: set[str], disk: bool) -> None:
        admission, is_used = self._service.admission, self._service.dispatcher.is_used
        try:
            async with asyncio.timeout(_UNLOAD_S):
                if disk:
                    removed = await asyncio.gather(*(admission.delete(digest, is_used) for digest in digests))
                else:
                    await asyncio.gather(*map(admission.unload, digests))
                    removed = []
        except TimeoutError:
            raise ReloadRefused("requests in flight still use it") from None
        except AdapterError as error:
            raise adapter_problem(error) from None
        for digest in digests:
            admission.forget(digest)
        if not all(removed):
            raise ReloadRefused("another process keeps its file loaded: unload it there first")

    async def learning(self, request: Request) -> Response:
        """What every shard collects, trains and adopts, with its decisions."""
        return await self._learning_of_all(request, purge=False)

    async def purge_learning(self, request: Request) -> Response:
        """Delete all rows, learned heads and decisions of every shard. Raises NoShard where one cannot be reached."""
        return await self._learning_of_all(request, purge=True)

    async def _learning_of_all(self, request: Request, purge: bool) -> Response:
        self.check(request)
        links = [link for link in self._service.dispatcher.links if link.info is not None]
        if purge and any(not link.client.connected for link in self._service.dispatcher.links):
            raise NoShard
        shards = await asyncio.gather(*(self._learning_of(link, purge) for link in links))
        return json_response({"purged": purge, "shards": shards})

    async def _learning_of(self, link: ShardLink, purge: bool) -> dict[str, Any]:
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
        adapters = {content.digest: name for name, content in self._service.admission.loading.contents()}
        for pair in values["pairs"]:
            pair["key"] = names.get(pair["tenant"])
            pair["adapter"] = adapters.get(pair["adapter_digest"])
        return shown | {"enabled": True} | values


def _shown(ref: Ref) -> dict[str, Any]:
    return {"source": ref.source.value, "id": ref.id, "revision": ref.revision}


def _key_names(keys: Keys) -> dict[str, str]:
    """Names of API keys by their tenants."""
    return {Caller("", key).tenant(None): key.name for key in keys}
