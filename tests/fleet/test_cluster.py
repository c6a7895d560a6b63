"""Which Ray a run uses, and where its files are."""

import os
import socket
import tempfile
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest
import ray

from strands_cosmos3.errors import ConfigError, EvaluationError
from strands_cosmos3.fleet import cluster as module
from strands_cosmos3.fleet.cluster import cluster, joinable, require_gpus

GRPC = bytes(3) + b"\x04" + bytes(5)  # an empty frame of settings


@pytest.fixture
def started(monkeypatch):
    """What Ray is asked for, instead of starting it."""
    calls = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "cluster_resources", dict)

    def init(address=None, **options):
        options["variables"] = dict(os.environ)
        calls.append((address, options))

    monkeypatch.setattr(ray, "init", init)
    return calls


@contextmanager
def server(greeting):
    """The address of a server that answers a greeting with ``greeting``; None says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            connection = listening.accept()[0]
            with connection:
                connection.recv(64)
                if greeting is None:
                    connection.recv(64)  # until the client gives up
                else:
                    connection.sendall(greeting)

        thread = Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        thread.join(10)


@pytest.mark.parametrize("elsewhere", ["head.example:6379", "[::1]:7000", "anyscale://job"])
def test_a_cluster_of_the_environment_is_named_and_not_joined(started, monkeypatch, elsewhere):
    monkeypatch.setenv("RAY_ADDRESS", elsewhere)
    with pytest.warns(UserWarning, match="is not joined: Ray runs on this machine") as warned:
        address = joinable(None)
    with cluster(address, cpus=3):
        pass
    assert f"RAY_ADDRESS={elsewhere} " in str(warned[0].message)
    ((asked, options),) = started
    assert asked == "local", "with None, Ray joins the cluster of RAY_ADDRESS"
    assert options["num_cpus"] == 3


@pytest.mark.parametrize(
    ("address", "variable"), [("local", "10.0.0.9:6379"), (None, ""), (None, "local")]
)
def test_what_asks_for_this_machine_is_not_warned(monkeypatch, address, variable):
    monkeypatch.setenv("RAY_ADDRESS", variable)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert joinable(address) is None


def test_auto_is_the_cluster_of_the_environment(monkeypatch):
    with server(GRPC) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert joinable("auto") == address
    for variable in ("", "auto", "local"):
        monkeypatch.setenv("RAY_ADDRESS", variable)
        assert joinable("auto") == "auto", "Ray looks for one on this machine"


@pytest.mark.parametrize(
    "address", ["", "head", ":6379", "head:0", "head:70000", "http://head:8265", "head:6379/x"]
)
def test_an_address_of_another_form_is_refused_with_the_right_one(monkeypatch, address):
    with pytest.raises(ConfigError, match="HOST:PORT of its head node, usually port 6379, or auto"):
        joinable(address)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=f"--address auto with RAY_ADDRESS={address}: "):
            joinable("auto")


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None])
def test_a_server_of_another_kind_is_not_waited_for(monkeypatch, greeting):
    monkeypatch.setattr(module, "_CONNECT_S", 0.3)
    with (
        server(greeting) as address,
        pytest.raises(EvaluationError, match=f"no cluster of Ray answers at --address {address} "),
    ):
        joinable(address)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", f"{'x' * 64}:6379"])
def test_nothing_at_the_address(address):
    with pytest.raises(EvaluationError) as raised:
        joinable(address)
    assert f"no cluster of Ray answers at --address {address}" in str(raised.value)
    assert "ray start --head" in str(raised.value)


def test_the_longest_folder_follows_from_the_paths_of_a_running_ray(local_ray):
    node = ray._private.worker._global_node
    inside = Path(node.plasma_store_socket_name).relative_to(node.get_temp_dir_path())
    folder = "/" + "f" * (module._LONGEST_FOLDER - 1)
    name = Path(node.get_temp_dir_path()).name
    pids = 2 * (7 - len(str(os.getpid())))  # they can have seven digits
    ray._private.utils.validate_socket_filepath(f"{folder}{'f' * pids}/{name}/{inside}")
    with pytest.raises(OSError, match="cannot exceed"):
        ray._private.utils.validate_socket_filepath(f"{folder}{'f' * pids}f/{name}/{inside}")


@pytest.mark.parametrize("name", ["one-too-long", "much-too-long", "ü"])
def test_a_temporary_folder_without_room_for_sockets_is_named(started, monkeypatch, name):
    length = {"one-too-long": module._LONGEST_FOLDER + 1, "much-too-long": 200}.get(name)
    folder = "/tmp/ü" if length is None else "/tmp/" + "f" * (length - 5)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: folder)
    with (
        pytest.warns(UserWarning, match="set TMPDIR to another one") as warned,
        cluster(None, cpus=1),
    ):
        pass
    assert f"in the temporary folder {folder}, whose path has more than 18" in str(
        warned[0].message
    )
    assert started[0][1]["_temp_dir"].startswith("/tmp/sc3-ray-")


def test_no_folder_for_sockets(started, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/tmp/" + "f" * 60)
    monkeypatch.setattr(module, "_SHORT_FOLDER", str(tmp_path / "missing"))
    with (
        pytest.raises(EvaluationError, match=r"set TMPDIR .* is not writable\."),
        cluster(None, cpus=1),
    ):
        pass
    assert not started


LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")


def test_ray_listens_on_loopback_only(local_ray):
    pids = [
        path.name
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and descends(path, os.getpid())
    ]
    sockets = {os.readlink(link) for pid in pids for link in links(Path("/proc") / pid / "fd")}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    listening = [
        row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets
    ]
    assert len(listening) >= 4, "Ray's own processes and this one"
    assert set(listening) <= set(LOOPBACK)


def descends(path, pid):
    """Whether a process is another one or was started by it, or by one that was."""
    while path.name not in ("0", "1"):
        if path.name == str(pid):
            return True
        try:
            path = path.parent / path.joinpath("stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            return False
    return False


def links(folder):
    with suppress(OSError):
        yield from (
            path for path in folder.iterdir() if path.is_symlink() and os.path.lexists(path)
        )


def test_gpus_that_are_not_there():
    with pytest.raises(
        ConfigError, match=r"num_gpus=8, but Ray sees 2 GPUs on this machine\. Use num_gpus=2"
    ):
        require_gpus(2, 8, None)
    require_gpus(8, 8, None)
