"""One router in the test's own process: the real application, dispatcher, tokenizer and HTTP server, on a free port.

Its shard is scripted. The tokenizer is byte-level with a few merges, so that texts and token ids are easy to write.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from lorikeet.adapters.sources.registry import SourceSettings
from lorikeet.proto import shard_pb2
from lorikeet.router.api.app import create_app
from lorikeet.router.api.service import Service
from lorikeet.router.config import RouterConfig
from lorikeet.router.dispatch.dispatcher import Dispatcher
from lorikeet.router.http_protocol import HttpServer
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.text.tokenizer import Tokenizer
from tests.router.scripted_loader import ScriptedLoader, finds_all
from tests.router.scripted_shard import Script, ScriptedShard

MODEL_ID = "test/model"
MERGES = [("Ġ", "t"), ("h", "e"), ("r", "e"), ("Ġt", "he"), ("Ġthe", "re")]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'critic' %}{{ raise_exception('no critics here') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}{% endfor %}[assistant]"
)


def write_model_folder(
    folder: Path,
    *,
    chat_template: bool | str = True,
    special_tokens: tuple[str, ...] = (),
    added_tokens: tuple[str, ...] = (),
) -> Path:
    """Tokenizer files as a model folder has them; `chat_template` may be another, `special_tokens` are further ones,
    and `added_tokens` further ones that are not special.
    """
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *alphabet, *("".join(pair) for pair in MERGES)]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", *special_tokens])
    backend.add_tokens([tokenizers.AddedToken(text, special=False) for text in added_tokens])
    backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    if chat_template:
        settings["chat_template"] = CHAT_TEMPLATE if chat_template is True else chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 1}))
    return folder


EOS = 1


@dataclass
class Serving:
    """A client, the server behind it, and its tokenizer."""

    client: httpx.AsyncClient
    url: str
    shard: ScriptedShard
    dispatcher: Dispatcher
    metrics: Metrics
    backend: tokenizers.Tokenizer
    loader: ScriptedLoader
    roots: Path
    """The folder of local adapters."""
    service: Service
    server: HttpServer

    def ids(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def says(self, *texts: str, ends: bool = False, **options: Any) -> None:
        """From now on the shard answers with these texts in turn, and then always with the last one."""
        answers = [self.ids(text) + ([EOS] if ends else []) for text in texts]
        count = 0

        def answer(submit: shard_pb2.Submit) -> Script:
            nonlocal count
            count += 1
            return Script(answers[min(count, len(answers)) - 1], **options)

        self.shard.answer = answer

    def says_ids(self, token_ids: list[int]) -> None:
        """From now on the shard answers with these tokens."""
        self.shard.answer = lambda submit: Script(token_ids)

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of each event of a stream, as JSON where it is."""
        async with self.client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"].startswith("text/event-stream")
            text = (await response.aread()).decode()
        return parse_events(text)

    def adapter(self, name: str, **files: str) -> str:
        """A local adapter's folder; returns `name`."""
        folder = self.roots / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in {"adapter_config.json": "{}", "adapter_model.safetensors": name, **files}.items():
            (folder / file).write_text(content)
        return name

    async def idle(self) -> None:
        """Wait until nothing runs, here and in the shard."""
        await self.shard.until(lambda: self.dispatcher.num_active == 0 and self.shard.num_running == 0)


def parse_events(text: str) -> list[Any]:
    """Strict about the framing: `data: ` and a blank line, nothing else."""
    assert text.endswith("\n\n")
    events: list[Any] = []
    for part in text[:-2].split("\n\n"):
        assert part.startswith("data: ") and "\n" not in part, part
        data = part.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


@asynccontextmanager
async def serving(folder: Path, *, connected: bool = True, **fields: Any) -> AsyncIterator[Serving]:
    """A router with a scripted shard; `fields` are RouterConfig's.

    `adapters=True` serves adapters too, through a scripted loader, from local folders. `chat_template=False` is a model
    without one; `template` is RouterConfig's `chat_template`. `pooled_model` is that of a shard without text.
    """
    template = fields.pop("template", None)
    loader = ScriptedLoader(folder, fields.pop("loader_answer", finds_all), fields.pop("loader_check", finds_all))
    if fields.pop("adapters", False):
        (folder / "roots").mkdir(parents=True, exist_ok=True)
        fields = {
            "loader_address": str(folder / "loader.sock"),
            "sources": SourceSettings(local_roots=(str(folder / "roots"),)),
            "adapter_source": "local",
            **fields,
        }
    tokens, added = fields.pop("special_tokens", ()), fields.pop("added_tokens", ())
    has_template = fields.pop("chat_template", True)
    model_folder = write_model_folder(
        folder / "model", chat_template=has_template, special_tokens=tokens, added_tokens=added
    )
    device = fields.pop("device", "cuda:0")
    shards_draft = fields.pop("shards_draft_model", "")
    pooled_model = fields.pop("pooled_model", None)
    shard = ScriptedShard(
        folder, lambda submit: Script([5] * submit.max_new_tokens), device, shards_draft, pooled_model=pooled_model
    )
    config = RouterConfig(
        **{
            "model_id": MODEL_ID,
            "model_path": str(model_folder),
            "shard_addresses": (shard.address,),
            "max_input_length": 2047,
            "max_total_tokens": 2048,
            **fields,
            "chat_template": template,
        }
    )
    tokenizer = Tokenizer.load(config)
    metrics = Metrics.configured(config)
    dispatcher = Dispatcher(config, tokenizer, metrics)
    app = create_app(dispatcher, tokenizer, config, metrics)
    server = HttpServer(app, config, port=0)
    backend = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    async with shard, loader:
        if connected:
            await dispatcher.start()
        running = asyncio.create_task(server._serve())
        preloader = app.state.service.preloader
        keeping = asyncio.create_task(preloader.run() if preloader is not None else asyncio.sleep(0))
        try:
            await shard.until(lambda: server.started and (dispatcher.ready or not connected))
            port = server.servers[0].sockets[0].getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=url, timeout=120) as client:
                yield Serving(
                    client,
                    url,
                    shard,
                    dispatcher,
                    metrics,
                    backend,
                    loader,
                    folder / "roots",
                    app.state.service,
                    server,
                )
        finally:
            server.should_exit = True
            server.force_exit = True
            await running
            keeping.cancel()
            await app.state.service.templates.close()
            app.state.service.grammars.close()
            await app.state.service.outputs.close()
            await dispatcher.stop()
            await asyncio.to_thread(app.state.service.usage.close)
            app.state.service.bodies.close()
            tokenizer.close()
