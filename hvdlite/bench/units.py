"""Sizes, rates and times as people write them, and back. Pure.

Bytes count in powers of 1024 (64M is 64 MiB), rates in powers of 1000, as network vendors do.
"""

from __future__ import annotations

import re

_BYTES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_RATES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)"


def parse_bytes(text: str) -> int:
    """Return a number of bytes: 512, 4K, 64M, 1.5GiB.

    Raises:
        ValueError: it is none, and the message says what is expected.
    """
    found = re.fullmatch(_NUMBER + r"\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise ValueError(f"{text!r} is not a size; write 512, 4K, 64M or 1G")
    return round(float(found[1]) * _BYTES[found[2].upper()])


def parse_series(text: str) -> list[int]:
    """Return the whole numbers of a list with ranges: `1K,64K`, `1K:64M:x4` (times four) or `8:32:+8`.

    The end of a range belongs to it if the steps meet it.

    Raises:
        ValueError: a part is no number or range, or a range does not grow.
    """
    numbers: list[int] = []
    for part in text.split(","):
        pieces = part.split(":")
        if len(pieces) == 1:
            numbers.append(parse_bytes(part))
            continue
        if len(pieces) != 3 or pieces[2][:1] not in ("x", "+"):
            raise ValueError(f"{part!r} is not a range; write FIRST:LAST:xFACTOR or FIRST:LAST:+STEP")
        value, last = parse_bytes(pieces[0]), parse_bytes(pieces[1])
        times = pieces[2][0] == "x"
        by = parse_bytes(pieces[2][1:])
        if by < (2 if times else 1) or value < 1:
            raise ValueError(f"{part!r} does not grow: start at 1 or more, and grow by x2, +1 or more")
        while value <= last:
            numbers.append(value)
            value = value * by if times else value + by
    return numbers


def parse_rate(text: str) -> float:
    """Return bytes per second: `25 Gbit/s`, `25Gbps`, `1.2 GB/s`.

    Raises:
        ValueError: it is no rate above zero.
    """
    found = re.fullmatch(_NUMBER + r"\s*([KMGT]?)(bit/s|bps|bit|B/s)", text.strip(), re.IGNORECASE)
    if not found or float(found[1]) <= 0:
        raise ValueError(f"{text!r} is not a rate; write 25 Gbit/s or 1.2 GB/s")
    per_unit = 1.0 if found[3].startswith("B") else 1 / 8
    return float(found[1]) * _RATES[found[2].upper()] * per_unit


def parse_time(text: str) -> float:
    """Return seconds: `15 us`, `1.5ms`, `2 s`.

    Raises:
        ValueError: it is no time.
    """
    found = re.fullmatch(_NUMBER + r"\s*(s|ms|us|µs|ns)", text.strip())
    if not found:
        raise ValueError(f"{text!r} is not a time; write 15 us, 1.5 ms or 2 s")
    return float(found[1]) * _TIMES[found[2]]


def show_bytes(nbytes: int) -> str:
    """Return `64 MiB` for whole powers of 1024, else the number with the largest unit below it."""
    for name, unit in [("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)]:
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def show_time(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    for name, unit in [("s", 1.0), ("ms", 1e-3)]:
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"


def show_rate(rate: float) -> str:
    """Return a rate of bytes per second as networks are sold: `25 Gbit/s`."""
    bits = rate * 8
    for name, unit in [("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)]:
        if bits >= unit:
            return f"{bits / unit:.4g} {name}"
    return f"{bits / 1e3:.4g} kbit/s"
