"""Horovod's exceptions. hvdlite raises only the first, its subclasses, and HostsUpdatedInterrupt."""

from __future__ import annotations

from hvdlite import HorovodInternalError
from hvdlite.elastic import HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]


class HorovodVersionMismatchError(ImportError):
    """A framework has another version than the one that Horovod was built for; hvdlite is not built for any."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name, self.version, self.installed_version = name, version, installed_version


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return what the error says."""
    return f"{name} {version} is expected, but {installed_version} is installed."
