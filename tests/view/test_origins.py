"""Foreign web pages: a browser that shows one must not read the scene, and neither must a name
pointed at this machine.
"""

import socket
import urllib.error
import urllib.request

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from strands_cosmos3.errors import ConfigError, RenderError
from strands_cosmos3.view.origins import only_own_pages, refused, require_origins
from strands_cosmos3.view.page import LivePage
from strands_cosmos3.worlds.arms import Robot

OWN, OTHER = "127.0.0.1:8080", "https://robots.example"


@pytest.mark.parametrize(
    ("host", "origin", "passes"),
    [
        (OWN, None, True),  # curl, or the page itself
        (OWN, f"http://{OWN}", True),
        ("localhost:9", "http://localhost:9", True),
        ("[::1]:8080", "http://[::1]:8080", True),
        (f"{socket.gethostname()}:8080", f"http://{socket.gethostname()}:8080", True),
        ("192.168.0.7:8080", "http://192.168.0.7:8080", True),
        (OWN, OTHER, True),
        ("robots.example", OTHER, True),
        (OWN, "https://evil.example", False),
        (OWN, "http://localhost:9090", False),
        (OWN, "null", False),  # a sandboxed frame, or a file
        ("evil.example:8080", "http://evil.example:8080", False),  # DNS rebinding
        ("evil.example:8080", None, False),
        ("127.0.0.1.evil.example", None, False),
        ("127.0.0.1:8080, evil.example", None, False),
        ("evil.example@127.0.0.1", None, False),
        ("", None, False),
        ("[::1", None, False),
    ],
)
def test_who_is_refused(host, origin, passes):
    assert (refused(host, origin, {OTHER}) is None) == passes


@pytest.mark.parametrize(
    "origin",
    ["robots.example", "https://a/b", "ftp://a", "*", "https://", "http://[", "https://a?x"],
)
def test_what_is_no_origin(origin):
    with pytest.raises(ConfigError, match="not an origin"):
        require_origins([origin])


def test_a_page_answers_its_own_pages_only():
    with LivePage(Robot().scene.model, port=0, origins=[OTHER]) as page:
        address = page.url.replace("http", "ws")
        for origin in (None, page.url, OTHER):
            connect(address, origin=origin).close()
        for origin in ("https://evil.example", "null"):
            with pytest.raises(InvalidStatus, match="403") as caught:
                connect(address, origin=origin)
            assert b"--page-origin" in caught.value.response.body
        with pytest.raises(InvalidStatus, match="403"):
            connect(address, additional_headers={"Host": "evil.example"})  # beside the right one
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(
                urllib.request.Request(page.url, headers={"Host": "evil.example"})
            )


def test_a_server_that_cannot_be_guarded_is_an_error():
    with pytest.raises(RenderError, match="refused"), only_own_pages(()):
        pass
