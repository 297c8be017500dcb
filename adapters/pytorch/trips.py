"""One gradient, or one buffer of gradients, on its way through the other ranks and back.

A trip is made, its `item()` is submitted, which gives it a handle, and it lands: waits,
and puts the reduced values where the gradient belongs. Trips know nothing of rounds and
passes; see `reducer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hvdlite import InvalidRequestError, MismatchError
from hvdlite.lowlevel import GroupHandle, Handle, Item, Kind

from .compression import Compressor, NoneCompressor
from .slots import Bundle, Slot
from .tensors import to_same

# What ranks have submitted under one name when a gradient is sparse on some of them only.
_DENSE_AND_SPARSE = {Kind.ALLREDUCE.name, Kind.ALLGATHER.name}


CHANGED = (
    "the gradient was changed, cleared or replaced before it was reduced, after backward() and before step(). "
    "Further backward passes were to come, or some parameter took no part on some rank, so that backward() returned "
    "before gradients were reduced. Call optimizer.synchronize() before gradients are used or changed."
)


class OrderError(InvalidRequestError, AssertionError):
    """backward(), zero_grad(), synchronize() and step() came in an order that would use wrong gradients."""


class SparseElsewhere(Exception):
    """The gradient of `who`, or one in its buffer, is sparse on some rank, as all ranks know now."""

    def __init__(self, who: Slot | Bundle) -> None:
        super().__init__(who.name)
        self.who = who


class Trip(Protocol):
    """What is under way.

    Attributes:
        name: under which it travels.
        handle: once it was submitted.
    """

    name: str
    handle: Handle | GroupHandle | None

    def land(self) -> None:
        """Wait, and put the reduced values in place."""


class DenseTrip:
    """A gradient that is reduced in place, perhaps in a compressed copy.

    Args:
        owners: parameters and their gradients, which lie in `memory`.
        memory: the gradient itself.
        slot: whose gradient may turn out to be sparse on another rank.
    """

    def __init__(
        self,
        name: str,
        owners: Sequence[tuple[torch.Tensor, torch.Tensor]],
        memory: torch.Tensor,
        compression: type[Compressor],
        slot: Slot | None = None,
    ) -> None:
        self.name, self._slot = name, slot
        self.handle: Handle | GroupHandle | None = None
        self._memory, self._compression = memory, compression
        self._watch = _Watch(name, owners, memory)
        if compression is not NoneCompressor:
            with torch.no_grad():
                self._outgoing, self._context = compression.compress(memory)
        else:
            self._outgoing, self._context = memory, None

    def item(self) -> Item:
        return to_same(self._outgoing)  # a compressor may hand its argument back, which then is reduced in place

    def land(self) -> None:
        """Wait, and put the reduced values in place."""
        reduced = self._wait()
        self._watch.check()
        if self._compression is not NoneCompressor:
            with torch.no_grad():
                restored = self._compression.decompress(reduced, self._context)
                if restored is not self._memory:
                    self._memory.copy_(restored)

    def _wait(self) -> torch.Tensor:
        assert self.handle is not None
        try:
            reduced: torch.Tensor = self.handle.wait()
        except MismatchError as error:
            if self._slot is not None and error.by_value.keys() == _DENSE_AND_SPARSE:
                raise SparseElsewhere(self._slot) from error
            raise
        return reduced


class BucketTrip:
    """A bundle whose gradients are in its buffer."""

    def __init__(self, bundle: Bundle, compression: type[Compressor]) -> None:
        assert bundle.bucket is not None
        self.name, self._bundle, self._bucket = bundle.name, bundle, bundle.bucket
        self.handle: Handle | GroupHandle | None = None
        self._compression, self._context = compression, None
        self._outgoing = self._bucket.memory
        if compression is not NoneCompressor:
            with torch.no_grad():
                self._outgoing, self._context = compression.compress(self._bucket.memory)

    def item(self) -> Item:
        return self._bucket.item() if self._outgoing is self._bucket.memory else to_same(self._outgoing)

    def land(self) -> None:
        """Wait, and put the reduced values in place."""
        assert self.handle is not None
        try:
            reduced = self.handle.wait()
        except MismatchError as error:
            if error.by_value.keys() == _DENSE_AND_SPARSE and not self._bucket.views:
                raise SparseElsewhere(self._bundle) from error
            raise
        if not self._bucket.intact():
            raise OrderError(f"{self.name!r}: {CHANGED}")
        if self._compression is not NoneCompressor:
            with torch.no_grad():
                restored = self._compression.decompress(reduced, self._context)
                if restored is not self._bucket.memory:
                    self._bucket.memory.copy_(restored)
        self._bucket.unload()


class DensifiedTrip(DenseTrip):
    """A sparse gradient that travels dense, and is sparse again afterwards."""

    def __init__(self, name: str, parameter: torch.Tensor, compression: type[Compressor]) -> None:
        gradient = _gradient_of(parameter)
        super().__init__(name, [], gradient.to_dense(), compression)
        self._parameter, self._sparse_dim = parameter, gradient.sparse_dim()
        self._watch = _Watch(name, [(parameter, gradient)], gradient)

    def land(self) -> None:
        super().land()
        self._parameter.grad = self._memory.to_sparse(self._sparse_dim)


class SparseTrip:
    """A sparse gradient whose entries go to every rank."""

    def __init__(self, name: str, parameter: torch.Tensor, handle: GroupHandle) -> None:
        gradient = _gradient_of(parameter)
        self.name = name
        self.handle: Handle | GroupHandle | None = handle
        self._parameter = parameter
        self._watch = _Watch(name, [(parameter, gradient)], gradient)

    def land(self) -> None:
        assert self.handle is not None
        reduced = self.handle.wait()
        self._watch.check()
        self._parameter.grad = reduced


class Announcement:
    """Says that a gradient is sparse here, under the name that dense ones have elsewhere."""

    def __init__(self, handle: Handle | GroupHandle, who: Slot | Bundle) -> None:
        self.name, self._who = who.name, who
        self.handle: Handle | GroupHandle | None = handle

    def land(self) -> None:
        assert self.handle is not None
        try:
            self.handle.wait()
        except MismatchError as error:
            if error.by_value.keys() != _DENSE_AND_SPARSE:
                raise
        raise SparseElsewhere(self._who)


class _Watch:
    """Notices whether gradients are touched while they travel."""

    def __init__(self, name: str, owners: Sequence[tuple[torch.Tensor, torch.Tensor]], memory: torch.Tensor) -> None:
        self._name, self._owners = name, owners
        self._memory, self._version = memory, memory._version

    def check(self) -> None:
        """Raise `OrderError` if somebody changed, cleared or replaced a gradient."""
        same = all(parameter.grad is gradient for parameter, gradient in self._owners)
        if same and self._memory._version == self._version:
            return
        raise OrderError(f"{self._name!r}: {CHANGED}")


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad
