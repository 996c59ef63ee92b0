"""The same connections with TLS: answers, streams, early ends, rejected heads, and certificates of clients."""

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.router.http_protocol.serving import TIMEOUT_S, Served, head, http_server, rest

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


class Certificates:
    """Files of a server's certificate, and contexts of clients that trust it."""

    def __init__(self, folder: Path) -> None:
        self._authority = trustme.CA()
        issued = self._authority.issue_cert("localhost")
        self.files = {name: str(folder / name) for name in ("ssl_certfile", "ssl_keyfile")}
        issued.cert_chain_pems[0].write_to_path(self.files["ssl_certfile"])
        issued.private_key_pem.write_to_path(self.files["ssl_keyfile"])
        self.authority = str(folder / "authority")
        self._authority.cert_pem.write_to_path(self.authority)

    def client(self, *, is_known: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self._authority.configure_trust(context)
        if is_known:
            self._authority.issue_cert("client@example.org").configure_cert(context)
        return context


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@pytest.fixture
def served(certificates: Certificates) -> Iterator[Served]:
    with http_server(**certificates.files, header_timeout_s=5.0) as started:
        yield started


def connect(served: Served, context: ssl.SSLContext, first: bytes) -> ssl.SSLSocket:
    plain = socket.create_connection(("127.0.0.1", served.port), timeout=TIMEOUT_S)
    client = context.wrap_socket(plain, server_hostname="localhost")
    client.sendall(first)
    return client


def test_requests_follow_one_another_on_a_connection(served: Served, certificates: Certificates) -> None:
    client = connect(served, certificates.client(), HEALTH)
    for _ in range(2):
        assert head(client).startswith(b"HTTP/1.1 200 OK")
        assert client.recv(4) == b"well"
        client.sendall(HEALTH)
    client.close()


def test_a_stream_arrives_event_by_event(served: Served, certificates: Certificates) -> None:
    client = connect(served, certificates.client(), b"GET /stream HTTP/1.0\r\n\r\n")
    head(client)
    assert client.recv(100) == b"data: 1\n\n"
    served.release()
    assert b"data: 2\n\n" in rest(client)


@pytest.mark.parametrize("says_goodbye", [True, False])
def test_the_end_of_a_connection_ends_the_request(
    served: Served, certificates: Certificates, says_goodbye: bool
) -> None:
    client = connect(served, certificates.client(), b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
    served.until("begin /wait")
    if says_goodbye:
        client.unwrap()
    client.close()
    served.until("gone")


def test_a_head_that_is_too_large_is_answered(served: Served, certificates: Certificates) -> None:
    client = connect(served, certificates.client(), b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000)
    assert rest(client).startswith(b"HTTP/1.1 431 ")
    assert served.rejected == ["head_too_large"]


def test_plain_http_gets_no_answer(served: Served) -> None:
    assert b"HTTP/1.1 200" not in rest(served.connect(HEALTH))


def test_clients_without_a_certificate_are_rejected(certificates: Certificates) -> None:
    fields = {**certificates.files, "ssl_ca_certs": certificates.authority, "ssl_cert_reqs": 2}
    with http_server(**fields) as served:
        known = connect(served, certificates.client(is_known=True), HEALTH)
        assert head(known).startswith(b"HTTP/1.1 200 OK")
        known.close()
        with connect(served, certificates.client(), HEALTH) as unknown:
            assert rest(unknown) == b""
        assert served.application.events.count("begin /health") == 1
