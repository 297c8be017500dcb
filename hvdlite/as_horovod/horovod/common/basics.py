"""Horovod's object of queries."""

from hvdlite.lowlevel import HorovodBasics

__all__ = ["HorovodBasics"]
