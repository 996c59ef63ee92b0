"""Generates the texts with a running server: one POST to /generate per prompt, many at a time."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import httpx

from lorikeet.adapters.errors import HeadsError, first_line
from lorikeet.adapters.medusa.prompts import EncodedPrompt
from lorikeet.adapters.medusa.texts import TextStore, Writing

BUSY = (429, 503)
BUSY_TIMEOUT_S = 120.0
"""How long a server may answer that it is busy."""
READ_TIMEOUT_S = 600.0


def write_with_server(
    url: str, adapter: str | None, encoded: Sequence[EncodedPrompt], store: TextStore, writing: Writing
) -> None:
    """Let the server at `url` generate the missing texts greedily; LORIKEET_TOKEN is its key. Raises HeadsError."""
    missing = [number for number in range(len(encoded)) if number not in store.outputs]
    limits = httpx.Limits(max_connections=writing.batch_size)
    timeout = httpx.Timeout(10.0, read=READ_TIMEOUT_S, pool=None)
    token = os.environ.get("LORIKEET_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    with (
        httpx.Client(base_url=url, limits=limits, timeout=timeout, headers=headers) as client,
        ThreadPoolExecutor(writing.batch_size) as pool,
    ):
        bodies = (_body(encoded[number], adapter, writing.max_new_tokens) for number in missing)
        asked = {pool.submit(_ask, client, body, encoded[i]): i for body, i in zip(bodies, missing, strict=True)}
        try:
            for answer in as_completed(asked):
                store.add([(asked[answer], answer.result())])
                writing.progress(len(store.outputs), len(encoded))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _body(prompt: EncodedPrompt, adapter: str | None, max_new_tokens: int) -> dict[str, Any]:
    if prompt.inputs is None:
        raise HeadsError("no text gives the tokens of a prompt's chat template: leave out --url")
    parameters: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "details": True}
    if adapter is not None:
        local = (folder := Path(adapter).expanduser()).is_dir()
        parameters["adapter_id"] = str(folder.resolve()) if local else adapter
        parameters["adapter_source"] = "local" if local else "hub"
    return {"inputs": prompt.inputs, "parameters": parameters}


def _ask(client: httpx.Client, body: dict[str, Any], prompt: EncodedPrompt) -> list[int]:
    """Output ids of one prompt."""
    started = time.monotonic()
    while True:
        try:
            answer = client.post("/generate", json=body)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise HeadsError(f"the server {client.base_url} cannot be reached: {first_line(error)}") from None
        if answer.status_code not in BUSY or time.monotonic() - started > BUSY_TIMEOUT_S:
            break
        time.sleep(0.5)
    if answer.status_code != 200:
        raise HeadsError(f"the server {client.base_url} answers with status {answer.status_code}: {_reason(answer)}")
    return _output(answer, prompt, str(client.base_url))


def _output(answer: httpx.Response, prompt: EncodedPrompt, url: str) -> list[int]:
    try:
        details = answer.json()["details"]
        ids = [int(token["id"]) for token in details["tokens"]]
        num_prompt = details.get("prompt_tokens", len(details.get("prefill", ())))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise HeadsError(f"the server {url} answers without details.tokens: it has no /generate like LoRAX's") from None
    if num_prompt and num_prompt != len(prompt.ids):
        problem = f"counts {num_prompt} tokens in a prompt of {len(prompt.ids)}"
        raise HeadsError(f"the server {url} {problem}: it serves another model")
    return ids


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200].replace("\n", " ")
