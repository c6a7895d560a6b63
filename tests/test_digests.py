"""SHA-256 of files, and what is remembered of it."""

import hashlib
import json
import os
import shutil
import stat
import time

import pytest

from strands_cosmos3 import digests
from strands_cosmos3.digests import file_sha256
from strands_cosmos3.errors import DigestError


@pytest.fixture
def reads(monkeypatch, tmp_path):
    """Files that are read for their digest; all are remembered, at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "_REMEMBERED_BYTES", 0)
    monkeypatch.setattr(digests, "_SETTLED_NS", -(10**12))
    read, original = [], hashlib.file_digest

    def counted(file, name):
        read.append(file.name)
        return original(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    return read


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 64)
    return path


def rewritten(path):
    """Other bytes in the same file, of the same size and time of modification."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"other")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replaced(path):
    """Another file of the same size and time of modification."""
    other = path.with_name("other")
    shutil.copy2(path, other)
    rewritten(other)
    os.replace(other, path)


def longer(path):
    with path.open("ab") as file:
        file.write(b"\0")


def entries(tmp_path):
    return list((tmp_path / "cache" / "strands-cosmos3" / "sha256").glob("*"))


@pytest.mark.parametrize("change", [rewritten, replaced, longer])
def test_a_file_is_read_once_while_it_is_unchanged(reads, file, change):
    before = file_sha256(file)
    assert before == file_sha256(file) == hashlib.sha256(file.read_bytes()).hexdigest()
    assert len(reads) == 1
    time.sleep(0.02)  # the clock of a file system may tick as slowly as that
    change(file)
    assert file_sha256(file) == hashlib.sha256(file.read_bytes()).hexdigest() != before
    assert len(reads) == 2


def test_a_file_is_read_anew_where_that_is_asked(reads, file, tmp_path, caplog):
    right = file_sha256(file)
    (entry,) = entries(tmp_path)
    entry.write_text(json.dumps({"sha256": "0" * 64}))
    assert file_sha256(file) == "0" * 64, "it is remembered"
    assert file_sha256(file, anew=True) == right == file_sha256(file)
    assert "has other bytes than were remembered" in caplog.text


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: entry.write_bytes(b"\xff\0"),
        lambda entry: entry.write_text("[1]"),
        lambda entry: entry.write_text(entry.read_text().replace('"sha256": "', '"sha256": "0')),
        lambda entry: entry.write_text(entry.read_text().replace('"sha256"', '"sha"')),
        lambda entry: (entry.unlink(), entry.mkdir()),
        lambda entry: (entry.unlink(), os.mknod(entry, stat.S_IFSOCK | 0o600)),
    ],
)
def test_a_damaged_memory_costs_time_only(reads, file, tmp_path, damage):
    right = file_sha256(file)
    (entry,) = entries(tmp_path)
    damage(entry)
    assert file_sha256(file) == right
    assert len(reads) == 2


@pytest.mark.parametrize("place", ["a file", "nowhere", "no home"])
def test_without_a_place_nothing_is_remembered(reads, file, tmp_path, monkeypatch, place):
    if place == "a file":
        (tmp_path / "cache").write_text("")
    elif place == "nowhere":
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(digests, "user_cache", lambda name: None)
    assert file_sha256(file) == file_sha256(file)
    assert len(reads) == 2


def test_a_file_that_was_just_written_is_not_remembered(reads, file, monkeypatch):
    monkeypatch.setattr(digests, "_SETTLED_NS", 10**12)
    assert file_sha256(file) == file_sha256(file)
    assert len(reads) == 2


def test_a_file_that_is_written_meanwhile_has_no_digest(file, monkeypatch):
    original = hashlib.file_digest

    def slow(opened, name):
        longer(file)
        return original(opened, name)

    monkeypatch.setattr(hashlib, "file_digest", slow)
    with pytest.raises(DigestError, match="was written while it was read"):
        file_sha256(file)


def test_a_file_that_is_gone(tmp_path):
    with pytest.raises(DigestError, match=r"gone cannot be read \(No such file"):
        file_sha256(tmp_path / "gone")


def test_a_long_wait_is_announced(reads, file, monkeypatch, caplog):
    file_sha256(file)
    monkeypatch.setattr(digests, "_ANNOUNCED_BYTES", 100)
    file_sha256(file)
    assert not caplog.text, "nothing is read"
    file_sha256(file, anew=True)
    assert "for its SHA-256, once while it is unchanged" in caplog.text
