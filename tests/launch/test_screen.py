"""What hvdrun shows: whole lines, labels, and bars, from pieces as ranks write them."""

from __future__ import annotations

import re

from hvdlite.launch.frames import Frame, FrameReader
from hvdlite.launch.runner import frames
from hvdlite.launch.screen import Screen, Style

TERMINAL = {"o": 20, "e": 20}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def written(screen: Screen, *pieces: tuple[int, str, bytes]) -> dict[str, bytes]:
    """Return what is written on each stream, up to the end."""
    out = {"o": b"", "e": b""}
    for stream, text in [one for piece in pieces for one in screen.feed(*piece)] + screen.close():
        out[stream] += text
    return out


def seen(pieces: list[tuple[str, bytes]]) -> list[str]:
    """Return the rows that a terminal shows after `pieces`."""
    rows = [""]
    for text in re.split(r"(\n|\r\x1b\[K)", b"".join(text for _, text in pieces).decode()):
        if text == "\n":
            rows.append("")
        elif text.startswith("\r"):
            rows[-1] = ""
        else:
            rows[-1] += text
    return rows


def test_lines_in_parts_are_shown_whole_with_the_rank():
    screen = Screen(Style())
    out = written(screen, (0, "o", b"a"), (1, "o", b"b1\nb"), (0, "e", b"!"), (0, "o", b"a\naa"), (1, "o", b"2\n"))
    assert out == {"o": b"[1] b1\n[0] aa\n[1] b2\n[0] aa\n", "e": b"[0] !\n"}


def test_without_labels_nothing_is_added():
    assert written(Screen(Style(label=False)), (0, "o", b"a\nb"))["o"] == b"a\nb"


def test_the_time_stands_in_front():
    line = written(Screen(Style(label=False, stamped=True)), (3, "o", b"a\n"))["o"].decode()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d a\n", line)


def test_a_bar_is_shown_as_it_is_drawn_and_again_after_lines_of_others():
    screen, pieces = Screen(Style(columns=TERMINAL)), []
    pieces += screen.feed(0, "e", b"\r 10%")
    assert seen(pieces) == ["[0]  10%"]
    pieces += screen.feed(1, "o", b"hello\n")
    assert seen(pieces) == ["[1] hello", "[0]  10%"]
    pieces += screen.feed(0, "e", b"\r 20%")
    assert seen(pieces) == ["[1] hello", "[0]  20%"]
    pieces += screen.feed(0, "e", b"\r100%\n")
    assert seen(pieces) == ["[1] hello", "[0] 100%", ""]


def test_the_lowest_rank_has_the_bottom_row_and_it_fits():
    screen = Screen(Style(columns=TERMINAL))
    pieces = screen.feed(1, "o", b"one") + screen.feed(0, "o", b"0123456789abcdefghijk") + screen.feed(2, "o", b"two")
    assert seen(pieces) == ["[0] 0123456789abcde"]
    assert seen(pieces + screen.close())[:3] == ["[0] 0123456789abcdefghijk", "[1] one", "[2] two"]


def test_in_a_file_a_bar_is_shown_now_and_then_and_nothing_is_lost():
    clock = Clock()
    screen = Screen(Style(), clock=clock)
    pieces = screen.feed(0, "o", b"\r1%") + screen.feed(0, "o", b"\r2%")
    assert not pieces
    clock.now = 11
    pieces = screen.feed(0, "o", b"\r3%")
    assert pieces == [("o", b"[0] 1%\r2%\n")]
    assert screen.feed(0, "o", b"\r4%\n") == [("o", b"[0] 3%\r4%\n")]


def test_a_row_is_measured_in_cells_of_the_terminal():
    screen = Screen(Style(True, False, {"o": 12}))
    red = b"\x1b[31m"
    assert screen.feed(0, "o", "漢漢漢漢漢".encode())[-1] == ("o", "[0] 漢漢漢".encode())  # two cells each, of eleven
    assert screen.feed(0, "o", b"\r" + red + b"1234567890")[-1] == ("o", b"[0] " + red + b"1234567\x1b[0m")
    assert screen.feed(0, "o", "\re\u0301e\u0301".encode())[-1] == ("o", "[0] e\u0301e\u0301".encode())


def test_a_prompt_without_end_in_a_file_is_not_cut():
    clock = Clock()
    screen = Screen(Style(), clock=clock)
    assert not screen.feed(0, "o", b"half")
    clock.now = 100
    assert not screen.feed(0, "o", b" and")
    assert screen.feed(0, "o", b" half\n") == [("o", b"[0] half and half\n")]


def test_a_line_without_end_is_shown_when_it_is_very_long():
    screen = Screen(Style())
    pieces = [piece for _ in range(300) for piece in screen.feed(0, "o", b"x" * 4096)]
    assert [len(text) for _, text in pieces] == [len("[0] ") + 257 * 4096 + 1]


def test_the_last_lines_of_a_rank_are_kept_and_told():
    heard = []
    screen = Screen(Style(), lambda rank, line: heard.append((rank, line)))
    for n in range(30):
        screen.feed(n % 2, "o", f"{n}\n".encode())
    screen.feed(1, "e", b"\r1%\r2%")
    assert screen.tail(0) == [str(n).encode() for n in range(0, 30, 2)]
    assert screen.tail(1) == [*(str(n).encode() for n in range(1, 30, 2)), b"2%"]
    assert heard == [(n % 2, str(n).encode()) for n in range(30)]


def test_frames_come_out_whole_however_they_are_cut():
    data = bytes(range(256)) * 30
    stream = b"".join(frames(12, "o", data)) + b"words of mpirun\n" + b"".join(frames(3, "x", b"0"))
    assert max(map(len, frames(12, "o", data))) < 1024
    for size in (1, 7, 1000, 4096):
        reader = FrameReader()
        found = [one for at in range(0, len(stream), size) for one in reader.feed(stream[at : at + size])]
        found += reader.feed(b"")
        assert b"".join(one.data for one in found if isinstance(one, Frame) and one.rank == 12) == data
        assert b"".join(one for one in found if isinstance(one, bytes)) == b"words of mpirun\n"
        assert found[-1] == Frame(3, "x", b"0")


def test_what_only_looks_like_a_frame_is_text():
    reader = FrameReader()
    found = reader.feed(b"a\x1eb c\n\x1e1 o") + reader.feed(b"x" * 2000) + reader.feed(b"\x1e") + reader.feed(b"")
    assert b"".join(one for one in found if isinstance(one, bytes)) == b"a\x1eb c\n\x1e1 o" + b"x" * 2000 + b"\x1e"


def test_what_one_rank_writes_without_labels_comes_out_byte_by_byte():
    data, step = bytes(3 * 2**20), 700_000
    pieces = [(0, "o", data[at : at + step]) for at in range(0, len(data), step)]
    assert written(Screen(Style(label=False)), *pieces)["o"] == data
