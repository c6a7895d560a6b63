"""Clients follow the environment's proxies, and addresses that ask for TLS."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from helpers.fake_libero import libero_server
from helpers.options import backend_options
from helpers.serving import libero_request, request
from strands_cosmos3 import create_policy
from strands_cosmos3.backends import make_backend
from strands_cosmos3.errors import ConfigError, ServiceUnavailableError
from strands_cosmos3.serving.client import ClientConfig, PolicyClient
from strands_cosmos3.serving.http_client import HttpPolicyClient, Post
from strands_cosmos3.serving.libero import LIBERO

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


class Proxy:
    """A proxy on a free port: it passes CONNECT's bytes and plain requests on, to whatever server,
    and keeps the first lines and the credentials.
    """

    def __init__(self, port: int, refuses: bool = False):
        self.to, self.refuses, self.seen, self.logins = port, refuses, [], []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._pass, args=(client,), daemon=True).start()

    def _pass(self, client: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += client.recv(1 << 16)
        first, *lines = head.partition(b"\r\n\r\n")[0].decode().split("\r\n")
        self.seen.append(first.rpartition(" ")[0])
        self.logins += [line.split()[-1] for line in lines if line.startswith("Proxy-Auth")]
        if self.refuses:
            client.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            client.close()
            return
        server = socket.create_connection(("127.0.0.1", self.to))
        if first.startswith("CONNECT"):
            client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            server.sendall(head.replace(b"http://gpu.invalid:8123", b"", 1))
        threading.Thread(target=_copy, args=(server, client), daemon=True).start()
        _copy(client, server)


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


@pytest.fixture(autouse=True)
def no_proxies_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    made: list[Proxy] = []

    def start(variable: str, port: int, login: str = "", **options: bool) -> Proxy:
        made.append(Proxy(port, **options))
        monkeypatch.setenv(variable, f"http://{login}{made[-1].address}")
        return made[-1]

    yield start
    for proxy in made:
        proxy.close()


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_websocket_goes_through_the_proxy(serve, proxied, variable):
    server = serve()
    proxy = proxied(variable, server.port, login="me:p%40ss@")
    options = backend_options(host="gpu.invalid", port=8123)
    with closing(make_backend("service", options=options)) as backend:
        assert backend.infer(request()).action.shape[1] == 8
    assert proxy.seen == ["CONNECT gpu.invalid:8123"]
    assert base64.b64decode(proxy.logins[0]) == b"me:p@ss"


def test_plain_http_is_passed_on_by_the_proxy(proxied):
    with libero_server() as server:
        proxy = proxied("HTTP_PROXY", server.server_port)
        options = backend_options(host="http://gpu.invalid/", port=8123, dialect="libero")
        with closing(make_backend("service", options=options)) as backend:
            backend.infer(libero_request())
    assert proxy.seen[0].startswith("GET http://gpu.invalid:8123/")
    assert proxy.seen[1].startswith("POST http://gpu.invalid:8123/")


@pytest.mark.parametrize("excepted", ["127.0.0.1", "example.org,127.0.0.1", "*"])
def test_servers_of_no_proxy_are_called_directly(serve, proxied, monkeypatch, excepted):
    server = serve()
    proxy = proxied("HTTP_PROXY", server.port)
    monkeypatch.setenv("NO_PROXY", excepted)
    options = backend_options(host="127.0.0.1", port=server.port)
    with closing(make_backend("service", options=options)) as backend:
        backend.infer(request())
    assert not proxy.seen


@pytest.mark.parametrize("host", ["wss://gpu.invalid", "https://gpu.invalid"])
def test_tls_has_a_proxy_of_its_own_and_its_refusal_is_named(proxied, host):
    other, proxy = proxied("HTTP_PROXY", 1), proxied("HTTPS_PROXY", 1, refuses=True)
    config = ClientConfig(host, attempts=1)
    over_http = host.startswith("https")
    client = HttpPolicyClient(config) if over_http else PolicyClient(config)
    message = Post(LIBERO, "/predict", {}, lambda info: None) if over_http else {}
    with pytest.raises(ServiceUnavailableError, match=r"through the proxy 127.* 403 Forbidden"):
        client.exchange(message, lambda reply: reply)
    assert proxy.seen == ["CONNECT gpu.invalid:443"]
    assert not other.seen


@pytest.mark.parametrize(
    "proxy",
    [
        *("socks5://a:1080", "https://a:3128", "http://"),
        *("http://a:port", "http://me:pw@a:99999", "http://[::1", "a:3128x"),
    ],
)
def test_another_kind_of_proxy_is_refused(monkeypatch, proxy):
    monkeypatch.setenv("HTTP_PROXY", proxy)
    with pytest.raises(ConfigError, match=r"only http:// proxies .*NO_PROXY"):
        PolicyClient()


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("cosmos3://wss://gpu.example", "wss://gpu.example:443"),
        ("cosmos3://wss://gpu.example:8443/policy", "wss://gpu.example:8443/policy"),
        ("cosmos3://gpu.example:9", "ws://gpu.example:9"),
        ("cosmos3://[::1]:9", "ws://[::1]:9"),
    ],
)
def test_an_address_of_a_provider_may_ask_for_tls(address, url):
    with create_policy(address, embodiment="droid") as policy:
        assert policy.backend._client._url == url
