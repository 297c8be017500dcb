"""Horovod's module of this name, for programs that import from it."""

from hvdlite import allgather_object, broadcast_object

from .state import broadcast_optimizer_state, broadcast_parameters

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
