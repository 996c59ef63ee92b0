"""Who a request counts for: its key, else its address."""

from starlette.requests import Request

from lorikeet.adapters.keys import Key
from lorikeet.router.requests.request import Caller


def test_identity() -> None:
    key = Key("team")
    assert Caller("id", key, address="192.0.2.1").identity == "key:team"
    assert Caller("id", None, "token", "192.0.2.1").identity == "address:192.0.2.1"
    assert Caller("id").identity == "address:"


def test_a_request_outside_the_middleware_has_no_address() -> None:
    assert getattr(Request({"type": "http", "state": {}}).state, "address", "") == ""
