"""URLs of servers as people type them."""

import pytest

from lorikeet.launcher.config.flags import FLAGS
from lorikeet.proto import server_url


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:3000/", "http://127.0.0.1:3000"),
        ("https://box/under/", "https://box/under"),
        ("localhost:3000", "http://localhost:3000"),
        ("box", "http://box"),
        (":3000", "http://127.0.0.1:3000"),
        ("[::1]:3000", "http://[::1]:3000"),
        (" box:80 ", "http://box:80"),
    ],
)
def test_a_scheme_may_be_missing(text: str, url: str) -> None:
    assert server_url.normalized(text) == url


@pytest.mark.parametrize("text", ["", "ftp://box", "http://", "box:port", "box:0", "box:99999", "a b", "http://[::1"])
def test_anything_else_is_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not the URL of a server: give one such as http://127\.0\.0\.1:3000"):
        server_url.normalized(text)


def test_the_default_is_the_launchers_port() -> None:
    assert server_url.default({}) == f"http://127.0.0.1:{FLAGS['port'].default}" == "http://127.0.0.1:3000"
    assert server_url.default({"LORIKEET_URL": "box:80"}) == "box:80"
