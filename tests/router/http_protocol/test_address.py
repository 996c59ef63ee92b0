"""Which address a request counts for: headers of untrusted connections are ignored."""

from typing import Any

import pytest

from lorikeet.router.http_protocol import Addresses


def resolved(trusted: tuple[str, ...], peer: str | None, **headers: str) -> str:
    scope: dict[str, Any] = {
        "client": None if peer is None else (peer, 1234),
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
    }
    return Addresses(trusted).of(scope)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("10.0.0.9", "10.0.0.9"),
        ("::ffff:10.0.0.9", "10.0.0.9"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        (None, ""),
    ],
)
def test_the_address_of_a_connection(peer: str | None, address: str) -> None:
    assert resolved((), peer) == address


def test_headers_of_an_untrusted_connection_are_ignored() -> None:
    for trusted in ((), ("192.168.0.0/16",)):
        assert resolved(trusted, "10.0.0.9", x_forwarded_for="1.1.1.1", forwarded="for=1.1.1.1") == "10.0.0.9"


@pytest.mark.parametrize(
    ("header", "address"),
    [
        ("1.1.1.1", "1.1.1.1"),
        ("6.6.6.6, 1.1.1.1", "1.1.1.1"),
        ("6.6.6.6, 1.1.1.1, 10.0.0.7", "1.1.1.1"),
        ("10.0.0.8, 10.0.0.7", "10.0.0.8"),
        ("1.1.1.1:5000", "1.1.1.1"),
        ("[2001:db8::5]:5000", "2001:db8::/64"),
        ("2001:db8::5", "2001:db8::/64"),
        ("6.6.6.6, nonsense", "10.0.0.9"),
        ("6.6.6.6, nonsense, 10.0.0.7", "10.0.0.7"),
        ("", "10.0.0.9"),
    ],
)
def test_x_forwarded_for_of_a_trusted_proxy(header: str, address: str) -> None:
    assert resolved(("10.0.0.0/8",), "10.0.0.9", x_forwarded_for=header) == address


@pytest.mark.parametrize(
    ("header", "address"),
    [
        ("for=1.1.1.1", "1.1.1.1"),
        ('For="[2001:db8::5]:80";proto=https', "2001:db8::/64"),
        ("for=6.6.6.6, by=10.0.0.1;for=1.1.1.1:99", "1.1.1.1"),
        ("for=6.6.6.6, for=unknown", "10.0.0.9"),
        ("for=6.6.6.6, for=_hidden", "10.0.0.9"),
        ("proto=https", "10.0.0.9"),
    ],
)
def test_forwarded_of_a_trusted_proxy(header: str, address: str) -> None:
    assert resolved(("10.0.0.0/8",), "10.0.0.9", forwarded=header) == address


def test_headers_that_disagree_are_not_believed() -> None:
    """A client may send the header that the proxy does not set."""
    trusted = ("10.0.0.0/8",)
    assert resolved(trusted, "10.0.0.9", x_forwarded_for="1.1.1.1", forwarded="for=6.6.6.6") == "10.0.0.9"
    assert resolved(trusted, "10.0.0.9", x_forwarded_for="1.1.1.1", forwarded="for=1.1.1.1") == "1.1.1.1"


def test_several_lines_of_one_header_are_one_list() -> None:
    scope = {
        "client": ("10.0.0.9", 1),
        "headers": [(b"x-forwarded-for", b"6.6.6.6"), (b"x-forwarded-for", b"1.1.1.1")],
    }
    assert Addresses(("10.0.0.0/8",)).of(scope) == "1.1.1.1"


def test_a_network_with_host_bits_is_rejected() -> None:
    with pytest.raises(ValueError, match="host bits"):
        Addresses(("10.0.0.1/8",))
