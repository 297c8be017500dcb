"""Horovod's exceptions. hvdlite raises only the first, and its subclasses."""

from __future__ import annotations

from hvdlite import HorovodInternalError

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed."""

    def __init__(self, skip_sync: bool) -> None:
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """A framework has another version than the one that Horovod was built for; hvdlite is not built for any."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name, self.version, self.installed_version = name, version, installed_version


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return what the error says."""
    return f"{name} {version} is expected, but {installed_version} is installed."
