"""What a server writes anywhere while it is asked everything there is, well and badly: no prompt, no output, no token.

Every request has words of its own in it; afterwards they are looked for in all lines, files and answers of others.
"""

import itertools
import json
import os
import re
import signal
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorikeet.adapters.keys import sha256
from lorikeet.launcher.exits import Exit
from tests.e2e.launched import ROOT, Launched
from tests.hub_server import HubServer, Repository, hub
from tests.router.usage_log.receiver import Receiver

pytestmark = pytest.mark.long

CALLERS_TOKEN, OTHER_TOKEN, KEY = "hf_zqCALLERzq", "hf_zqOTHERzq", "zqKEYzq"
"""Tokens of a caller with access to the private adapter and of one without, and an API key of the server."""
OPERATORS_TOKEN, ADMIN_KEY, PASSWORD = "hf_zqOPERATORzq", "zqADMINzq", "zqPASSWORDzq"
STORES_SECRET = "zqSTOREzq"
"""For those children that ask stores for adapters; in their environments alone."""
TOKENS = (CALLERS_TOKEN, OTHER_TOKEN, KEY, OPERATORS_TOKEN, ADMIN_KEY, PASSWORD)
PRIVATE, RAISING = "owner/private", "owner/raising"
TEMPLATE = "{% for message in messages %}{{ raise_exception(message['content']) }}{% endfor %}"
ROUTES = ("/generate", "/generate_stream", "/", "/invocations", "/predict", "/v1/completions", "/v1/chat/completions")
SHORTEST_OUTPUT = 12
"""Characters: shorter texts may stand anywhere by chance."""
WORDS = re.compile(r"zqWORDS\d+zq")


@dataclass
class Scene:
    """A running server, where it writes, and everything that it was asked and answered."""

    launched: Launched
    folder: Path
    hub: HubServer
    receiver: Receiver
    client: httpx.Client
    outputs: set[str] = field(default_factory=set)
    answers: list[tuple[set[str], str]] = field(default_factory=list)
    """The words of a request, and all of its answer."""
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def words(self) -> str:
        """New ones, which a tokenizer cannot take for anything else."""
        return f"zqWORDS{next(self.numbers)}zq"

    def ask(self, route: str, content: Any, words: str, token: str | None = None, **headers: str) -> httpx.Response:
        sent = content if isinstance(content, bytes) else json.dumps(content).encode()
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        headers = {"content-type": "application/json", **headers}
        response = self.client.post(f"{route}?q={words}", content=sent, headers=headers)
        self.answers.append(
            ({words, *WORDS.findall(sent.decode(errors="replace"))}, f"{response.headers}\n{response.text}")
        )
        return response

    def generate(self, route: str, token: str | None = None, prompt: str = "", **fields: Any) -> httpx.Response:
        """A good request, unless `fields` or the token make it a bad one; remembers what was generated."""
        words = self.words()
        response = self.ask(route, body(route, prompt or words, **fields), words, token)
        if response.status_code == 200:
            self.outputs |= {text for text in texts(response) if len(text.strip()) >= SHORTEST_OUTPUT}
        return response

    @property
    def private_folder(self) -> Path:
        lines = [line for line in self.launched.lines if "shard_connected" in line]
        (found,) = set(re.findall(r"unix:(\S+)/shard-0\.sock", "\n".join(lines)))
        return Path(found)


def body(route: str, prompt: str, **fields: Any) -> dict[str, Any]:
    """A request for an unlikely text."""
    if route.startswith("/v1"):
        whole: dict[str, Any] = {"model": "", "temperature": 1.8, "seed": 7, "max_tokens": 24, **fields}
        if route.endswith("chat/completions"):
            return {"messages": [{"role": "user", "content": prompt}], **whole}
        return {"prompt": prompt, **whole}
    distribution = {"do_sample": True, "temperature": 1.8, "seed": 7, "max_new_tokens": 24, **fields}
    if route == "/predict":
        return {"prompt": prompt, **distribution, "return_full_text": False}
    stream = distribution.pop("stream", None)
    return {"inputs": prompt, "parameters": distribution} | ({} if stream is None else {"stream": stream})


def texts(response: httpx.Response) -> list[str]:
    """All that was generated, of whatever route."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        value = response.json()
        value = value[0] if isinstance(value, list) else value
        if isinstance(value, str):
            return [value]
        if "generated_text" in value:
            return [value["generated_text"]]
        return [choice.get("text") or choice["message"]["content"] for choice in value["choices"]]
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    if "choices" not in events[0]:
        return [events[-1].get("generated_text") or ""]
    parts: dict[int, str] = {}
    for choice in itertools.chain.from_iterable(event.get("choices", []) for event in events):
        delta = choice.get("text") or choice.get("delta", {}).get("content") or ""
        parts[choice["index"]] = parts.get(choice["index"], "") + delta
    return list(parts.values())


def adapter_files() -> dict[str, bytes]:
    folder = ROOT / "demo" / "adapters" / "record"
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module", params=["plain", "json"])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("secrets")
    keys = folder / "keys.yaml"
    keys.write_text(f"- {{name: team-a, sha256: {sha256(KEY)}}}\n")
    for name in ("tmp", "hub"):
        (folder / name).mkdir()
    repositories = {
        PRIVATE: Repository(adapter_files(), token=CALLERS_TOKEN),
        RAISING: Repository({**adapter_files(), "chat_template.jinja": TEMPLATE.encode()}, token=CALLERS_TOKEN),
    }
    arguments = ["--cpu-memory", "256MiB", "--threads", "1", "--log-level", "debug", "--api-keys", str(keys)]
    arguments.append("--api-keys-optional")
    arguments += ["--usage-log", str(folder / "usage.jsonl"), *(["--json-output"] if request.param == "json" else [])]
    with hub(repositories) as at_hub, Receiver() as receiver:
        environment = {"TMPDIR": str(folder / "tmp"), "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "0"}
        environment |= {"HF_ENDPOINT": at_hub.url, "HF_TOKEN": OPERATORS_TOKEN, "ADMIN_KEY": ADMIN_KEY}
        environment |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": STORES_SECRET}
        environment["REQUEST_LOGGER_URL"] = receiver.url.replace("://", f"://me:{PASSWORD}@") + f"/in?key={PASSWORD}"
        with Launched(*arguments, is_forked=False, **environment) as launched:
            launched.wait_until_ready()
            with httpx.Client(base_url=launched.url, timeout=120) as client:
                yield Scene(launched, folder, at_hub, receiver, client)


def test_no_prompt_or_token_is_written_anywhere(scene: Scene) -> None:
    ask_well(scene)
    ask_for_adapters(scene)
    ask_badly(scene)
    ask_with_wrong_fields(scene)
    leave_early(scene)
    end_the_shard(scene)
    check_processes(scene)
    check_answers(scene)
    check_files(scene, "while it serves")
    scene.launched.signal(signal.SIGTERM)
    assert scene.launched.wait() == Exit.OK
    check_files(scene, "after its end")
    check_usage(scene)


def ask_well(scene: Scene) -> None:
    for route in ROUTES:
        for token in (None, KEY, OTHER_TOKEN, ADMIN_KEY):
            assert scene.generate(route, token).status_code == 200
        more: dict[str, Any] = {"stop": [scene.words()]}
        if route.startswith("/v1"):
            more |= {"n": 2, "logprobs": 2} if route == "/v1/completions" else {"n": 2, "logprobs": True}
            more |= {"user": scene.words(), "prediction": {"type": "content", "content": scene.words()}}
        elif route != "/predict":
            more |= {"api_token": OTHER_TOKEN}
            more |= {} if route == "/generate_stream" else {"decoder_input_details": True, "details": True}
        if route == "/v1/completions":
            more.pop("prediction")
        assert scene.generate(route, **more).status_code == 200, route
        if route in ("/", "/v1/completions", "/v1/chat/completions"):
            assert scene.generate(route, stream=True).status_code == 200
    words = scene.words()
    ids = [token["id"] for token in scene.ask("/tokenize", {"inputs": words}, words).json()]
    response = scene.ask("/v1/completions", {**body("/v1/completions", ""), "prompt": ids, "echo": True}, words)
    assert words in response.json()["choices"][0]["text"]


def ask_for_adapters(scene: Scene) -> None:
    """With valid and invalid tokens, with failing templates, and unknown names."""
    for route in ROUTES:
        name = "model" if route.startswith("/v1") else "adapter_id"
        for token, status in ((CALLERS_TOKEN, 200), (OTHER_TOKEN, 404), (None, 404)):
            response = scene.generate(route, token, **{name: PRIVATE})
            assert response.status_code in (status, 401, 200 if route == "/generate_stream" else 404), response.text
        scene.generate(route, CALLERS_TOKEN, **{name: f"owner/{scene.words()}"})
        scene.generate(route, CALLERS_TOKEN, **{name: scene.words() + " " * 3 + scene.words()})
        if not route.startswith("/v1") and route != "/predict":
            scene.generate(route, adapter_id=PRIVATE, api_token=CALLERS_TOKEN)
            scene.generate(route, adapter_id=PRIVATE, api_token=OTHER_TOKEN, heads_id=scene.words())
    response = scene.generate("/v1/chat/completions", CALLERS_TOKEN, model=RAISING)
    assert response.status_code == 400 and "zqWORDS" in response.text  # to whoever sent it
    for path in ("/admin/adapters/load", "/admin/adapters/pin", "/admin/adapters/unload", "/v1/load_lora_adapter"):
        for token in (ADMIN_KEY, OTHER_TOKEN):
            words = scene.words()
            named = {"adapter_id": words, "alias": words, "lora_name": words, "lora_path": words, "api_token": token}
            scene.ask(path, named, words, token)
    assert any(CALLERS_TOKEN in shown for shown in scene.hub.tokens)


def ask_badly(scene: Scene) -> None:
    """Bodies that are no requests, messages that no template takes, texts that no tokenizer takes."""
    for route in (*ROUTES, "/tokenize"):
        words = scene.words()
        good = json.dumps(body(route, words) if route != "/tokenize" else {"inputs": words}).encode()
        broken = [good[:-1], good.replace(b'"' + words.encode(), b'"\\ud800' + words.encode()), words.encode()]
        broken += [json.dumps(words).encode(), json.dumps([words]).encode(), b'"' + words.encode() + b'\xff"', b""]
        broken += [json.dumps({words: words}).encode()]
        broken += [good.replace(words.encode(), words.encode() * 10_000)] if route != "/tokenize" else []
        for sent in broken:
            assert scene.ask(route, sent, words, CALLERS_TOKEN).status_code >= 400 or route == "/generate_stream"
        scene.ask(route, good, words, CALLERS_TOKEN, **{"content-type": f"text/{words}"})
        scene.ask(route, good, words, authorization=f"Basic {OTHER_TOKEN}")
    words = scene.words()
    for messages in (
        words,
        [words],
        [{"role": words, "content": words}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": words}]}],
        [{"role": "user", "content": {words: words}}],
        [{"role": "assistant", "content": None, "tool_calls": [{"id": words}]}],
        [{"role": "user", words: words}],
        [],
    ):
        scene.ask("/v1/chat/completions", {"model": "", "messages": messages, "max_tokens": 4}, words, CALLERS_TOKEN)


def ask_with_wrong_fields(scene: Scene) -> None:
    """Every field of every route, as it is published, holds words where they don't belong."""
    document = scene.client.get("/openapi.json").json()
    num_refused = 0

    def ask(asked: tuple[str, str, bool, Any]) -> int:
        route, name, is_parameter, value = asked
        words = scene.words()
        wrong = json.loads(json.dumps(value).replace("WORDS", words))
        whole = body(route, words, max_tokens=3) if route.startswith("/v1") else body(route, words, max_new_tokens=3)
        (whole["parameters"] if is_parameter else whole)[name] = wrong
        return scene.ask(route, whole, words, OTHER_TOKEN).status_code

    asked = [
        (route, name, is_parameter, value)
        for route in ROUTES
        for name, is_parameter in fields_of(document, route)
        if name != "request_id"  # logged, so that callers find their requests
        for value in ("WORDS", {"WORDS": "WORDS"}, ["WORDS", {"WORDS": 1}], -1e9)
    ]
    assert len(asked) > 500
    with ThreadPoolExecutor(8) as pool:
        num_refused = sum(400 <= status < 500 for status in pool.map(ask, asked))
    assert num_refused > len(asked) / 2


def fields_of(document: dict[str, Any], route: str) -> list[tuple[str, bool]]:
    """(field, whether it is one of `parameters`)"""

    def properties(schema: dict[str, Any]) -> dict[str, Any]:
        for choice in (schema, *schema.get("anyOf", ()), *schema.get("allOf", ())):
            if "$ref" in choice:
                return properties(document["components"]["schemas"][choice["$ref"].rpartition("/")[2]])
            if "properties" in choice:
                return dict(choice["properties"])
        raise AssertionError(schema)

    whole = properties(document["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"])
    found = [(name, False) for name in whole]
    if "parameters" in whole:
        found += [(name, True) for name in properties(whole["parameters"])]
    return found


def leave_early(scene: Scene) -> None:
    for route in ("/generate_stream", "/v1/completions", "/v1/chat/completions"):
        more = {"max_tokens": 2000} if route.startswith("/v1") else {"max_new_tokens": 2000, "ignore_eos_token": True}
        sent = body(route, scene.words(), stream=True, **more)
        with scene.client.stream("POST", route, json=sent) as response:
            assert response.status_code == 200
            for _ in response.iter_raw():
                break


def end_the_shard(scene: Scene) -> None:
    """While it computes; what it computed goes on in the next one."""
    more = {"max_new_tokens": 400, "ignore_eos_token": True}
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(scene.generate, route, CALLERS_TOKEN, **more) for route in ("/generate", "/predict")]
        until(scene, "lorikeet_running_requests", 2)
        os.kill(scene.launched.shard(0), signal.SIGKILL)
        assert [each.result().status_code for each in asked] == [200, 200]
    assert any("shard_lost" in line for line in scene.launched.lines)


def until(scene: Scene, name: str, least: float) -> None:
    end = time.monotonic() + 60
    while True:
        lines = scene.client.get("/metrics").text.splitlines()
        if any(line.startswith(name + " ") and float(line.split()[-1]) >= least for line in lines):
            return
        assert time.monotonic() < end, name
        time.sleep(0.01)


def check_processes(scene: Scene) -> None:
    """Command lines and environments are readable for the whole machine, or outlive the process in dumps."""
    children = scene.launched.children()
    assert len(children) == 3
    for pid in [*children, *descendants(children)]:
        for name in ("cmdline", "environ"):
            content = Path(f"/proc/{pid}/{name}").read_text(errors="replace")
            assert not found_in(content, TOKENS), (pid, name)
            assert STORES_SECRET not in content or pid != scene.launched.shard(0), name
            assert not WORDS.search(content)
    assert not found_in(Path(f"/proc/{scene.launched.pid}/cmdline").read_text(), TOKENS)


def descendants(pids: list[int]) -> list[int]:
    """The children of processes, and theirs."""
    found: list[int] = []
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            own = [int(word) for word in (task / "children").read_text().split()]
            found += own + descendants(own)
    return found


def check_answers(scene: Scene) -> None:
    """No response includes another caller's words, or any token."""
    for words, answer in scene.answers:
        assert not found_in(answer, TOKENS), answer
        assert set(WORDS.findall(answer)) <= words
    for path in ("/metrics", "/info", "/v1/models", "/openapi.json", "/health", "/admin/adapters"):
        for headers in ({}, {"authorization": f"Bearer {ADMIN_KEY}"}, {"accept": "application/json"}):
            shown = scene.client.get(path, headers=headers)
            response = f"{shown.headers}\n{shown.text}"
            assert not found_in(response, TOKENS), path
            assert not WORDS.search(response), path
            assert not found_in(response, scene.outputs), path


def check_files(scene: Scene, when: str) -> None:
    """All lines that were written, and all files wherever the server may have left one."""
    assert len(scene.outputs) > 20
    needles = {*scene.outputs, *(json.dumps(text)[1:-1] for text in scene.outputs)}
    written = {"the log": scene.launched.output.encode(), "the events": repr(scene.receiver.events).encode()}
    written |= {str(path): path.read_bytes() for path in files_below(scene.folder)}
    if when == "while it serves":
        assert stat.S_IMODE(scene.private_folder.stat().st_mode) == 0o700
        assert str(scene.private_folder / "router.json") in written
        assert str(scene.folder / "usage.jsonl") in written
    problems = []
    for place, content in written.items():
        found = [token.encode() for token in (*TOKENS, STORES_SECRET) if token.encode() in content]
        found += re.findall(rb"zqWORDS\d+zq", content)
        found += [text.encode() for text in needles if text.encode() in content]
        problems += [f"{place} holds {text!r}: {line_of(content, text)!r}" for text in found]
    assert not problems, f"{when}:\n" + "\n".join(problems[:40])


def line_of(content: bytes, text: bytes) -> bytes:
    """The first in which it stands."""
    at = content.index(text)
    return content[content.rfind(b"\n", 0, at) + 1 :].split(b"\n", 1)[0][:2000]


def files_below(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield path


def found_in(text: str, needles: Any) -> list[str]:
    return [needle for needle in needles if needle in text]


def check_usage(scene: Scene) -> None:
    """It was written at all, with what it is for."""
    records = [json.loads(line) for line in (scene.folder / "usage.jsonl").read_text().splitlines()]
    assert len(records) > 500
    assert {line["key"] for line in records} == {None, "team-a", ""}
    assert {line["adapter"] for line in records} >= {None, PRIVATE}
    assert {line["error"] for line in records} >= {None, "validation", "bad_request", "dropped", "download_adapter"}
    assert scene.receiver.events and {event["api_token"] for event in scene.receiver.events} == {None}
