"""Files: what is read is an object of JSON inside its folder, and what is written appears whole."""

import os

import numpy as np
import pytest

from helpers.storage import full_disk
from strands_cosmos3.checks import image_array
from strands_cosmos3.errors import DatasetFormatError, LayoutError, ShapeError, StorageError
from strands_cosmos3.resources import (
    UNFINISHED,
    contained,
    read_json,
    write_folder,
    write_json,
    write_whole,
)
from strands_cosmos3.tables import read_toml


def test_a_path_inside_is_returned_and_a_link_that_leads_out_is_refused(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "in.json").write_text("{}")
    (tmp_path / "out.json").write_text("{}")
    (root / "link.json").symlink_to(tmp_path / "out.json")
    assert contained(root / "in.json", root, "checkpoint", LayoutError) == root / "in.json"
    with pytest.raises(LayoutError, match="outside the checkpoint"):
        contained(root / "link.json", root, "checkpoint", LayoutError)
    with pytest.raises(DatasetFormatError, match="outside the dataset"):
        contained(root / "../out.json", root, "dataset", DatasetFormatError)


def test_links_of_the_hub_s_cache_may_lead_into_its_blobs_and_nowhere_else(tmp_path):
    snapshot, blobs = tmp_path / "models--a--b/snapshots/abc", tmp_path / "models--a--b/blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    (blobs / "1").write_text("{}")
    (snapshot / "config.json").symlink_to(blobs / "1")
    assert contained(snapshot / "config.json", snapshot, "checkpoint", LayoutError)
    other = tmp_path / "mine/snapshots/abc"
    other.mkdir(parents=True)
    (tmp_path / "mine/secret").write_text("{}")
    (other / "config.json").symlink_to(tmp_path / "mine/secret")
    with pytest.raises(LayoutError, match="outside"):
        contained(other / "config.json", other, "checkpoint", LayoutError)


def test_a_loop_of_links_and_a_nul_are_typed_errors(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("loop/x", "a\0b"):
        with pytest.raises(LayoutError):
            read_json(
                contained(tmp_path / name, tmp_path, "checkpoint", LayoutError),
                LayoutError,
                "Remedy.",
            )


@pytest.mark.parametrize(
    "text", ["[1]", "3", "{", "\xff", "[" * 100_000, '{"a": ' + "1" * 5000 + "}"]
)
def test_what_is_no_json_object_is_a_typed_error_with_its_remedy(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DatasetFormatError, match=r"x\.json.*Remedy\."):
        read_json(path, DatasetFormatError, "Remedy.")


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    for text in ('{"a": 1}', '\n{"a": 1}', '{\r\n"a": 1}'):
        (tmp_path / "x.json").write_text(text, encoding="utf-8-sig")
        assert read_json(tmp_path / "x.json", LayoutError, "") == {"a": 1}
    for text in ("a = 1", "# a comment\na = 1", "a = 1\r\n"):
        (tmp_path / "x.toml").write_text(text, encoding="utf-8-sig")
        assert read_toml(tmp_path / "x.toml") == {"a": 1}


def test_an_absent_file_is_a_typed_error_with_its_remedy(tmp_path):
    with pytest.raises(LayoutError, match=r"does not exist\. Remedy\."):
        read_json(tmp_path / "x.json", LayoutError, "Remedy.")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "deep/figures.json"
    write_json(path, {"a": "ä"})
    assert read_json(path, LayoutError, "") == {"a": "ä"}

    def fail(hidden):
        hidden.write_text("half")
        assert list(path.parent.glob(UNFINISHED)) == [hidden]
        assert hidden.suffix == ".json"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_whole(path, fail)
    assert [file.name for file in path.parent.iterdir()] == ["figures.json"]
    assert read_json(path, LayoutError, "") == {"a": "ä"}


def test_a_written_file_and_its_folder_reach_the_disk(tmp_path, monkeypatch):
    flushed, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (flushed.append(os.fstat(fd).st_ino), fsync(fd)))
    write_json(tmp_path / "a.json", {})
    assert flushed == [(tmp_path / "a.json").stat().st_ino, tmp_path.stat().st_ino]


@pytest.mark.parametrize(
    "write",
    [
        write_json,
        lambda path, value: write_folder(path, lambda hidden: write_json(hidden / "b", value)),
    ],
)
def test_a_full_disk_is_a_typed_error_that_names_the_path(tmp_path, write):
    write(tmp_path / "x", {"old": 1})
    with (
        full_disk(10),
        pytest.raises(StorageError, match=r"/\.?x.*cannot be written.*unchanged") as caught,
    ):
        write(tmp_path / "x", {"new": "x" * 1000})
    assert isinstance(caught.value, OSError)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    write(tmp_path / "x", {"new": 1})


def test_the_file_before_is_kept_where_that_is_asked(tmp_path):
    for n in range(3):
        write_whole(
            tmp_path / "x",
            lambda hidden, n=n: hidden.write_text(str(n)),
            previous=tmp_path / "before",
        )
    assert [(tmp_path / name).read_text() for name in ("x", "before")] == ["2", "1"]


def test_pictures_are_uint8_of_their_shape():
    picture = np.zeros((4, 6, 3), np.uint8)
    assert image_array(picture, "view") is picture
    assert image_array(picture[None], "clip", (1, 4, 6, 3)).shape == (1, 4, 6, 3)
    for wrong in (
        picture.astype(np.int16),
        picture[..., 0],
        picture[..., :2],
        picture[:0],
        picture[None],
    ):
        with pytest.raises(ShapeError, match=r"view must be uint8 of shape \[H, W, 3\]"):
            image_array(wrong, "view")
    with pytest.raises(ShapeError, match=r"clip must be uint8 of shape \[N, 4, 8, 3\]"):
        image_array(picture[None], "clip", (None, 4, 8, 3))


def test_a_folder_that_was_renamed_in_time_is_not_replaced_by_the_one_before(tmp_path):
    """A kill after both renames leaves the new folder in place and the old one hidden beside it."""
    folder, old = tmp_path / "checkpoint", tmp_path / ".checkpoint.old"
    for path, content in ((folder, "new"), (old, "outdated")):
        path.mkdir()
        (path / "a").write_text(content)
    write_folder(folder, lambda hidden: (hidden / "b").write_text((folder / "a").read_text()))
    assert (folder / "b").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
