"""`lorikeet-replay` and the receipts it reads, against a server with scripted responses."""

import json
from pathlib import Path
from typing import Any

import pytest

from lorikeet.launcher.cli.replay import ReceiptError, SavedReceipt, different_parts, first_difference, found_in, main
from lorikeet.proto import digest
from tests.launcher.cli.test_client import Scripted, serving

PROMPT, OUTPUT = [1, 2, 3], [4, 5, 6, 7]


def tokens(ids: list[int], *, shown: bool = True) -> dict[str, Any]:
    scripted = {"num_tokens": len(ids), "sha256": digest.of_tokens(ids)}
    return scripted | ({"token_ids": ids} if shown else {})


def receipt(*, shown: bool = True, prompt: list[int] = PROMPT, output: list[int] = OUTPUT, **more: Any) -> Any:
    parameters = {
        "seed": 7, "max_new_tokens": 4, "stop": ["."], "ignore_eos": True, "do_sample": True, "temperature": 0.5,
        "top_k": 3, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "logit_bias": [], "watermark": None,
    }  # fmt: skip
    return {
        "receipt": 1, "request_id": "mine", "version": "1", "base_digest": "ba", "tokenizer_digest": "70",
        "dtype": "float32", "device": "cpu", "max_total_tokens": 99, "adapter": None,
        "parameters": parameters | more.pop("parameters", {}),
        "prompt": tokens(prompt, shown=shown),
        "output": {**tokens(output, shown=shown), "finish_reason": "length"},
        **more,
    }  # fmt: skip


def run(tmp_path: Path, text: str, again: Any, *arguments: str) -> tuple[int, Scripted]:
    (tmp_path / "receipt").write_text(text)
    scripted = Scripted(body=json.dumps({"generated_text": "x", "receipt": again}).encode())
    with serving(scripted) as client:
        return main([str(tmp_path / "receipt"), "--url", client.url, *arguments]), scripted


def test_identical_tokens_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, scripted = run(tmp_path, json.dumps(receipt()), receipt())
    assert (code, capsys.readouterr().out) == (0, "identical: 4 tokens\n")
    ((path, headers, body),) = scripted.asked
    assert (path, headers["x-request-id"], body["inputs"]) == ("/generate", "mine", PROMPT)
    assert body["parameters"]["receipt"] is True and body["parameters"]["adapter_id"] == "__base_model__"


ADAPTER = {"id": "a", "source": "local", "digest": "d1"}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({}, {"output": [4, 5, 9, 7]}, ["from token 2 on: 4 tokens before, 4 now", "only the tokens differ"]),
        ({}, {"output": [4, 5]}, ["from token 2 on: 4 tokens before, 2 now", "only the tokens differ"]),
        ({"shown": False}, {"output": [4]}, ["different: 4 tokens before, 1 now", "only the tokens differ"]),
        ({}, {"output": [9], "base_digest": "bb"}, ["from token 0 on", "different base digest: ba, now bb"]),
        ({}, {"output": [9], "tokenizer_digest": "x"}, ["different tokenizer digest: 70, now x"]),
        ({}, {"output": [9], "dtype": "bfloat16"}, ["different dtype: float32, now bfloat16"]),
        ({}, {"output": [9], "device": "cuda"}, ["different device: cpu, now cuda"]),
        ({}, {"output": [9], "prompt": [8]}, ["different prompt: "]),
        ({}, {"output": [9], "version": "2"}, ["different version: 1, now 2", "only the tokens differ"]),
        ({}, {"output": [9], "parameters": {"top_k": 0}}, ["different parameter top_k: 3, now 0"]),
        (
            {"adapter": ADAPTER},
            {"output": [9], "adapter": {**ADAPTER, "digest": "d2"}},
            ["different adapter digest: d1, now d2"],
        ),
        ({"adapter": ADAPTER}, {"output": [9]}, ["different adapter digest: d1, now none"]),
    ],
)
def test_different_tokens_are_reported_with_different_inputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: Any, after: Any, said: list[str]
) -> None:
    options = ("--prompt", str(tmp_path / "prompt"))
    (tmp_path / "prompt").write_text("[1, 2, 3]")
    code, _ = run(tmp_path, json.dumps(receipt(**before)), receipt(**after), *options)
    printed = capsys.readouterr().out
    assert code == 1 and printed.startswith("different")
    assert all(part in printed for part in said), printed
    assert ("only the tokens differ" in printed) == ("only the tokens differ" in said)


def test_identical_tokens_of_a_different_server_are_identical(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = run(tmp_path, json.dumps(receipt()), receipt(version="2", base_digest="bb"))
    printed = capsys.readouterr().out
    assert code == 0
    assert printed.splitlines() == [
        "identical: 4 tokens",
        "  different base digest: ba, now bb",
        "  different version: 1, now 2",
    ]


@pytest.mark.parametrize("wrap", ["lines", "list", "answers", "details"])
def test_several_receipts_are_replayed_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrap: str
) -> None:
    several = [receipt(), receipt(request_id="other", output=[4, 5, 6])]
    text = {
        "lines": "\n".join(map(json.dumps, several)) + "\n",
        "list": json.dumps(several),
        "answers": "\n".join(json.dumps({"generated_text": "", "receipt": one}) for one in several),
        "details": json.dumps([{"details": {"receipt": one}} for one in several]),
    }[wrap]
    code, scripted = run(tmp_path, text, receipt())
    printed = capsys.readouterr().out
    assert code == 1 and len(scripted.asked) == 2
    assert printed.startswith("mine: identical") and "\nother: different from token 3 on" in printed
    assert printed.endswith("\n1 of 2 identical\n")


@pytest.mark.parametrize(
    ("text", "path", "inputs"),
    [
        ("def add(a, b):\n", "/generate", "def add(a, b):\n"),
        ("[1, 2, 3]", "/generate", PROMPT),
        ('["no", "ids"]', "/generate", '["no", "ids"]'),
        ('[{"role": "user", "content": "hi"}]', "/v1/chat/completions", [{"role": "user", "content": "hi"}]),
    ],
)
def test_a_prompt_is_read_from_a_file(tmp_path: Path, text: str, path: str, inputs: Any) -> None:
    (tmp_path / "prompt").write_text(text)
    code, scripted = run(tmp_path, json.dumps(receipt(shown=False)), receipt(), "--prompt", str(tmp_path / "prompt"))
    ((requested, _, body),) = scripted.asked
    assert (code, requested) == (0, path)
    assert (body.get("inputs") or body.get("messages")) == inputs


def test_several_prompts_are_read_line_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    several = "\n".join(json.dumps(receipt(shown=False)) for _ in range(3))
    prompts = tmp_path / "prompts"
    prompts.write_text('"a text"\n[1, 2, 3]\n[{"role": "user", "content": "hi"}]\n')
    code, scripted = run(tmp_path, several, receipt(), "--prompt", str(prompts))
    assert code == 0 and [path for path, _, _ in scripted.asked] == ["/generate", "/generate", "/v1/chat/completions"]
    prompts.write_text('"a text"\n')
    assert run(tmp_path, several, receipt(), "--prompt", str(prompts))[0] == 1
    assert "contains 1 prompts for 3 receipts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "contains no receipt"),
        ("nothing", "it is not JSON"),
        ("{}", "this is not a receipt"),
        ('{"receipt": 2}', "receipt format 2 is not supported"),
        ('{"receipt": 1}', "the receipt lacks parameters, prompt"),
        (json.dumps(receipt() | {"prompt": {**tokens(PROMPT), "token_ids": [1, 2]}}), "the receipt was modified"),
        (json.dumps(receipt() | {"output": {**tokens(OUTPUT), "token_ids": [1, 2]}}), "the receipt was modified"),
    ],
)
def test_an_invalid_receipt_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    code, scripted = run(tmp_path, text, receipt())
    assert code == 1 and scripted.asked == [] and said in capsys.readouterr().err


def test_a_receipt_with_hashes_needs_the_right_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = json.dumps(receipt(shown=False))
    assert run(tmp_path, text, receipt())[0] == 1
    assert "holds only the hash of its prompt: give the prompt" in capsys.readouterr().out
    (tmp_path / "prompt").write_text("[1, 2]")
    code, scripted = run(tmp_path, text, receipt(), "--prompt", str(tmp_path / "prompt"))
    assert code == 1 and scripted.asked == []
    assert "are not those of the receipt's prompt" in capsys.readouterr().out


def test_server_and_connection_errors_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "receipt").write_text(json.dumps(receipt()))
    with serving(Scripted(status=404, body=b'{"error": "no such adapter"}')) as client:
        assert main([str(tmp_path / "receipt"), "--url", client.url]) == 1
    assert capsys.readouterr().out == "the server rejected the request: no such adapter\n"
    assert main([str(tmp_path / "receipt"), "--url", "http://127.0.0.1:1"]) == 1
    assert "cannot connect to http://127.0.0.1:1" in capsys.readouterr().out
    assert main([str(tmp_path / "absent")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_a_server_without_receipts_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, json.dumps(receipt()), None)[0] == 1
    assert capsys.readouterr().out == "the response includes no receipt to compare: this is not a receipt\n"


def test_every_parameter_is_explicit_in_the_request() -> None:
    path, body = SavedReceipt.read(receipt(adapter=ADAPTER)).request()
    assert path == "/generate"
    assert body["parameters"] == {
        "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
        "seed": 7, "stop": ["."], "ignore_eos_token": True, "temperature": 0.5,
        "speculative_verification": "shared-noise",
        "receipt": True, "do_sample": True, "max_new_tokens": 4, "truncate": 3, "watermark": False,
        "return_full_text": False, "top_k": 3, "adapter_id": "a", "adapter_source": "local",
    }  # fmt: skip
    path, body = SavedReceipt.read(receipt(parameters={"logit_bias": [[5, -1.5]], "do_sample": False})).request()
    assert (path, body["logit_bias"], body["temperature"]) == ("/v1/completions", {"5": -1.5}, 0.0)


def test_parameters_that_openai_s_routes_lack_are_an_error() -> None:
    scripted = SavedReceipt.read(receipt(parameters={"watermark": {"gamma": 0.5, "delta": 2.0}}))
    with pytest.raises(ReceiptError, match="no watermarks"):
        scripted.request([{"role": "user", "content": "hi"}])


def test_positions_and_parts() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3, 4]) == 3
    assert first_difference([], [1]) == 0
    (read,) = found_in(json.dumps(receipt()))
    assert different_parts(read, read) == []


def test_a_bad_url_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "receipt").write_text(json.dumps(receipt()))
    assert main([str(tmp_path / "receipt"), "--url", "ftp://box"]) == 1
    assert capsys.readouterr().err.startswith("lorikeet-replay: 'ftp://box' is not the URL of a server")


@pytest.mark.parametrize(
    "changes",
    [
        {"parameters": 1},
        {"parameters": {}},
        {"prompt": []},
        {"output": {"sha256": 1}},
        {"prompt": tokens(PROMPT) | {"token_ids": [-1]}},
        {"prompt": tokens(PROMPT) | {"token_ids": [1 << 70]}},
        {"request_id": "a\r\nb: c"},
        {"request_id": "€"},
        {"adapter": "x"},
        {"receipt": 2, "request_id": "\x1b]0;x\x07"},
    ],
)
def test_a_broken_receipt_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(receipt() | changes))
    assert main([str(path), "--url", "http://127.0.0.1:9"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("lorikeet-replay: ") and error.count("\n") == 1, error


def test_deeply_nested_json_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "receipt.json"
    path.write_text("[" * 200_000)
    assert main([str(path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_what_a_receipt_says_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(receipt()))
    answer = {"generated_text": "", "receipt": receipt(output=[9]) | {"dtype": "\x1b]0;owned\x07\nidentical"}}
    with serving(Scripted(body=json.dumps(answer).encode())) as server:
        assert main([str(path), "--url", server.url]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\\x1b]0;owned\\x07\\nidentical" in out
    assert main([str(path), "--url", "http://127.0.0.1:9", "--token", "secret\n"]) == 1
    captured = capsys.readouterr()
    assert "secret" not in captured.out + captured.err and "token" in captured.err
