"""One POST per record: retries, failures, and credentials, which no message shows."""

import base64
import socket
from dataclasses import replace

import pytest

from lorikeet.router import usage_log
from lorikeet.router.usage_log import Unwritten, UsagePost, shown_url
from tests.router.usage_log.receiver import Receiver
from tests.router.usage_log.test_writer import RECORD

EVENT = {"tokens": 5, "adapter_id": "", "input": None, "output": None, "api_token": None, "model_id": "m"}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_log, "RETRY_DELAYS_S", (0.01, 0.02, 0.03))
    monkeypatch.setattr(usage_log, "TIMEOUT_S", 0.3)


def test_an_event_has_lorax_s_keys() -> None:
    with Receiver() as receiver:
        writer = UsagePost(receiver.url)
        writer.write(RECORD)
        writer.write(replace(RECORD, adapter="mine", input="in", output=["a", "b"]))
        writer.close()
    assert receiver.events == [EVENT, {**EVENT, "adapter_id": "mine", "input": "in", "output": ["a", "b"]}]
    assert receiver.paths == ["/", "/"]
    assert receiver.headers[0]["content-type"] == "application/json"
    assert "authorization" not in receiver.headers[0]


@pytest.mark.parametrize("statuses", [(500,), (503, 429), (500, 502, 504)])
def test_three_retries(statuses: tuple[int, ...]) -> None:
    with Receiver(*statuses) as receiver:
        writer = UsagePost(receiver.url)
        writer.write(RECORD)
        writer.close()
    assert receiver.events == [EVENT] * (len(statuses) + 1)


@pytest.mark.parametrize(("statuses", "num_attempts"), [((500,) * 9, 4), ((404,), 1), ((302,), 1), ((401,), 1)])
def test_failures_without_further_retries(statuses: tuple[int, ...], num_attempts: int) -> None:
    with Receiver(*statuses) as receiver:
        writer = UsagePost(receiver.url)
        with pytest.raises(Unwritten, match=f"REQUEST_LOGGER_URL answered {statuses[0]}"):
            writer.write(RECORD)
        writer.close()
    assert len(receiver.events) == num_attempts


def test_a_closed_connection_is_opened_again() -> None:
    with Receiver() as receiver:
        writer = UsagePost(receiver.url)
        writer.write(RECORD)
        assert writer._connection.sock is not None
        writer._connection.sock.shutdown(socket.SHUT_RDWR)
        writer.write(RECORD)
        writer.close()
    assert len(receiver.events) == 2


def test_a_server_that_never_answers_times_out() -> None:
    with Receiver() as receiver:
        receiver.may_answer.clear()
        writer = UsagePost(receiver.url)
        with pytest.raises(Unwritten, match="REQUEST_LOGGER_URL: TimeoutError"):
            writer.write(RECORD)
        writer.close()


def test_no_listener() -> None:
    with pytest.raises(Unwritten, match="REQUEST_LOGGER_URL: Connection refused"):
        UsagePost("http://me:secret@127.0.0.1:9/").write(RECORD)


def test_credentials_of_the_url_go_into_a_header() -> None:
    with Receiver() as receiver:
        writer = UsagePost(receiver.url.replace("://", "://me:se%40cret@") + "/in?key=k")
        writer.write(RECORD)
        writer.close()
    assert base64.b64decode(receiver.headers[0]["authorization"].removeprefix("Basic ")) == b"me:se@cret"
    assert receiver.paths == ["/in?key=k"]
    assert "secret" not in receiver.headers[0]["host"] and "@" not in receiver.headers[0]["host"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8899", "http://127.0.0.1:8899"),
        ("https://me:secret@a.example/in?token=secret#secret", "https://a.example/in"),
        ("http://secret@[::1]:80/", "http://[::1]:80/"),
    ],
)
def test_shown_url(url: str, shown: str) -> None:
    assert shown_url(url) == shown


@pytest.mark.parametrize(
    "url", ["", "a.example", "ftp://a.example", "http://", "http://me:se/cret@a", "http://[secret"]
)
def test_an_invalid_url_is_not_quoted(url: str) -> None:
    with pytest.raises(ValueError, match=r"^REQUEST_LOGGER_URL must be an http:// or https:// URL$"):
        UsagePost(url)
