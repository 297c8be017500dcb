"""Commits in a folder: what is whole is read, whatever happened while the last one was written."""

from __future__ import annotations

import os
import threading

import pytest

from hvdlite.elastic import commits as module
from hvdlite.elastic.commits import Commits
from hvdlite.errors import InvalidRequestError


def test_the_newest_is_read_and_only_two_are_kept(tmp_path):
    commits = Commits(str(tmp_path / "new" / "folder"))
    assert commits.read() is None
    for epoch in range(5):
        assert commits.write({"epoch": epoch})
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == ["commit-4", "commit-5"]
    found = Commits(str(tmp_path / "new" / "folder")).read()
    assert (found.number, found.content) == (5, {"epoch": 4})


@pytest.mark.parametrize("kept", range(0, 200, 7))
def test_a_torn_one_is_told_and_the_one_before_used(tmp_path, caplog, kept):
    commits = Commits(str(tmp_path))
    commits.write(list(range(10)))
    commits.write(list(range(20)))
    whole = (tmp_path / "commit-2").read_bytes()
    kept %= len(whole)
    (tmp_path / "commit-2").write_bytes(whole[:kept])
    assert commits.read().content == list(range(10))
    assert "commit-2 cannot be used, and an older one is looked for" in caplog.text


def test_a_changed_byte_anywhere_is_found(tmp_path):
    commits = Commits(str(tmp_path))
    commits.write("first")
    commits.write("second")
    whole = (tmp_path / "commit-2").read_bytes()
    for place in range(len(whole)):
        (tmp_path / "commit-2").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert commits.read().content == "first", place
    (tmp_path / "commit-2").write_bytes(whole + b"x")
    assert commits.read().content == "first"


def test_after_a_torn_one_the_next_gets_a_new_number(tmp_path):
    commits = Commits(str(tmp_path))
    commits.write(1)
    (tmp_path / "commit-2").write_bytes(b"torn")
    (tmp_path / "commit-9.part").write_bytes(b"never finished")
    assert commits.write(3)
    assert commits.read().number == 3


def test_nothing_whole_is_no_commit(tmp_path):
    (tmp_path / "commit-1").write_bytes(b"")
    assert Commits(str(tmp_path)).read() is None


def test_a_full_disk_keeps_the_commit_before_and_is_told(tmp_path, caplog, monkeypatch):
    commits = Commits(str(tmp_path))
    commits.write("before")

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    assert not commits.write("after")
    assert "a commit cannot be written to" in caplog.text
    assert "No space left on device. Training goes on" in caplog.text
    assert os.listdir(tmp_path) == ["commit-1"]
    assert commits.read().content == "before"


def test_a_folder_that_is_a_file_is_told_at_each_commit(tmp_path, caplog):
    (tmp_path / "file").write_text("mine")
    commits = Commits(str(tmp_path / "file"))
    assert commits.read() is None
    assert not commits.write(1)
    assert "File exists. Training goes on" in caplog.text


def test_what_cannot_be_pickled_is_refused(tmp_path):
    commits = Commits(str(tmp_path))
    with pytest.raises(InvalidRequestError, match=r"cannot be pickled: TypeError: .*Keep only plain values"):
        commits.write({"lock": threading.Lock()})
    assert os.listdir(tmp_path) == []
