"""What a rank that was killed while it made shared memory leaves in the file system."""

from __future__ import annotations

from hvdlite.comm.segment import remove_left_behind


def test_only_what_that_process_made_is_removed(tmp_path):
    (tmp_path / "hvdlite-12-abc").write_bytes(b"segment")
    (tmp_path / "hvdlite-12-pipes").mkdir()
    (tmp_path / "hvdlite-12-pipes" / "page").write_bytes(b"page")
    for other in ("hvdlite-123-abc", "hvdlite-1-abc", "another-12-abc"):
        (tmp_path / other).write_bytes(b"")
    remove_left_behind(12, str(tmp_path))
    remove_left_behind(12, str(tmp_path))
    assert sorted(place.name for place in tmp_path.iterdir()) == ["another-12-abc", "hvdlite-1-abc", "hvdlite-123-abc"]
