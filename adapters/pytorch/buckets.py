"""Flat buffers in which the gradients of several parameters travel together.

Gradients live in a `ViewBucket`: nothing is copied to reduce them but what autograd has put elsewhere. Into a
`CopyBucket` they are copied to travel, and back: one call for many small ones costs less than to send each. The buffers
lie in memory that the ranks of a host share, where there is any, and are then reduced where they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from hvdlite import InvalidRequestError, ProcessSet
from hvdlite.lowlevel import Item, SharedBuffer, shared_buffer

from .tensors import as_array, describe

BUCKET_BYTES = 4 * 2**20  # of a buffer
LAST_BYTES = 2**20  # of the buffer of the first parameters: backward() is over by then, and all wait for it
ALONE_BYTES = 2**20  # a gradient of so many travels alone: to copy it into another buffer would gain nothing
_ALIGN = 64  # bytes, of buffers in shared memory

Parameters = Sequence[torch.Tensor]


class SparseInBucket(Exception):
    """Gradient number `i` is sparse, and was to be copied into a buffer."""

    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.i = i


class Bucket(Protocol):
    """A buffer, with a place for the gradient of each of some parameters of one dtype.

    Attributes:
        memory: flat.
        places: views into it, one for each parameter.
        views: the gradients live in it.
    """

    memory: torch.Tensor
    places: list[torch.Tensor]
    views: bool

    def item(self) -> Item:
        """Return what is submitted."""

    def keep(self, i: int) -> None:
        """Gradient i will not start before backward() returns: notice from now on whether it is changed."""

    def changed(self, fired: Sequence[int]) -> int | None:
        """Return which of the gradients `fired` was changed in place since it was kept."""

    def fill(self, wanted: Sequence[bool]) -> None:
        """Bring all gradients into the buffer. What a parameter has no gradient for, or is not wanted, is zero there.

        Parameters that are wanted then have gradients.

        Raises:
            SparseInBucket: a gradient is sparse, and cannot be in here.
            InvalidRequestError: a parameter became another one.
        """

    def intact(self) -> bool:
        """Return whether nobody has changed, cleared or replaced a gradient since `fill`."""

    def unload(self) -> None:
        """Bring what was reduced to where the gradients are."""

    def give(self) -> None:
        """Let parameters that were not wanted, too, have what their place in the buffer holds."""

    def move_in(self) -> None:
        """Take gradients over that live in an older buffer."""

    def release(self) -> None:
        """A new round begins, or the gradients are cleared: let go of what the last one has left."""


class _Buffer:
    """Flat memory, and a view into it for each parameter."""

    def __init__(self, parameters: Parameters, memory: torch.Tensor, home: SharedBuffer | None) -> None:
        self.parameters, self.memory = parameters, memory
        self._item, self._address = _item_of(memory, home), memory.data_ptr()
        self.places: list[torch.Tensor] = []
        start = 0
        for p in parameters:
            self.places.append(self._place(memory[start : start + p.numel()], p))
            start += p.numel()

    def _place(self, memory: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return memory.view(parameter.shape)  # in order, for ranks may differ in the strides of their parameters

    def item(self) -> Item:
        if (
            self.memory.data_ptr() != self._address
        ):  # torch has moved it: share_memory_() of a gradient moves its storage
            self._item, self._address = _item_of(self.memory, None), self.memory.data_ptr()
        return self._item

    def release(self) -> None:
        pass


class ViewBucket(_Buffer):
    """A buffer in which gradients live, with the strides of their parameters where these are dense.

    A large gradient that autograd has just made need not be copied into it: it is *lent*, that is, reduced from where
    it is into the buffer, and becomes a view only then. The memory that it had is given back when gradients are
    cleared, as without us: given back at once, it would be taken from the process, and come back page by page.

    Args:
        lends: gradients may be lent. No compression wants all of them in one piece.
    """

    views = True

    def __init__(
        self, parameters: Parameters, memory: torch.Tensor, home: SharedBuffer | None, lends: bool = False
    ) -> None:
        super().__init__(parameters, memory, home)
        self._kept, self._version = -1, 0
        self._owned = [False] * len(parameters)
        self._lends = lends and len(parameters) == 1 and memory.nbytes >= ALONE_BYTES
        self._lent: torch.Tensor | None = None
        self._lent_version = 0
        self._spent: torch.Tensor | None = None  # was lent

    def _place(self, memory: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return memory.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())

    def keep(self, i: int) -> None:
        self._adopt([i])
        self._kept = self.memory._version

    def changed(self, fired: Sequence[int]) -> int | None:
        first = fired[0]
        here = self.parameters[first].grad is self.places[first]
        return first if here and self._kept not in (-1, self.memory._version) else None

    def item(self) -> Item:
        item = super().item()
        if self._lent is None:
            return item
        return item._replace(source=as_array(self._lent.as_strided(self.memory.shape, (1,))))

    def fill(self, wanted: Sequence[bool]) -> None:
        """A gradient that is sparse becomes dense."""
        self._lent = self.parameters[0].grad if self._lends and self._fits() else None
        if self._lent is not None:
            self._lent_version, self._version, self._kept = self._lent._version, self.memory._version, -1
            return
        empty = self._adopt(range(len(self.parameters)))
        for i in empty:
            self.places[i].zero_()
            if wanted[i]:
                self.parameters[i].grad = self.places[i]
        self._owned = [not empty or p.grad is place for p, place in zip(self.parameters, self.places, strict=True)]
        self._version, self._kept = self.memory._version, -1

    def intact(self) -> bool:
        if self._lent is not None:
            same = self.parameters[0].grad is self._lent and self._lent._version == self._lent_version
            return same and self.memory._version == self._version
        for parameter, place, owned in zip(self.parameters, self.places, self._owned, strict=True):
            if owned and parameter.grad is not place:
                return False
        return self.memory._version == self._version

    def unload(self) -> None:
        if self._lent is not None:
            self.parameters[0].grad = self.places[0]
            self._spent, self._lent = self._lent, None

    def release(self) -> None:
        self._spent = self._lent = None

    def _fits(self) -> bool:
        """Return whether the gradient is where autograd has put it, and laid out as in the buffer."""
        gradient, place = self.parameters[0].grad, self.places[0]
        if gradient is None or gradient is place or gradient.layout is not torch.strided or gradient.requires_grad:
            return False
        if gradient.dtype is not place.dtype or gradient.shape != place.shape or gradient.stride() != place.stride():
            return False
        if gradient.is_conj() or gradient.is_neg() or gradient.device != place.device:
            return False
        return gradient.untyped_storage().data_ptr() != self.memory.untyped_storage().data_ptr()

    def give(self) -> None:
        for parameter, place in zip(self.parameters, self.places, strict=True):
            parameter.grad = place

    def move_in(self) -> None:
        self._adopt(range(len(self.parameters)))

    def _adopt(self, which: Iterable[int]) -> list[int]:
        """Let gradients live in the buffer, and return of which there are none."""
        empty, adopted, sources = [], [], []
        for i in which:
            parameter, place = self.parameters[i], self.places[i]
            gradient = parameter.grad
            if gradient is place:
                continue
            if gradient is None:
                empty.append(i)
                continue
            adopted.append(i)
            sources.append(_fitting(gradient, parameter, place))
        if adopted:
            with torch.no_grad():
                torch._foreach_copy_([self.places[i] for i in adopted], sources)
            for i in adopted:
                self.parameters[i].grad = self.places[i]
        return empty


class CopyBucket(_Buffer):
    """A buffer that gradients are copied into to travel.

    Args:
        sparse_as_dense: sparse gradients travel, too, and are sparse again afterwards.
    """

    views = False

    def __init__(
        self, parameters: Parameters, memory: torch.Tensor, home: SharedBuffer | None, sparse_as_dense: bool
    ) -> None:
        super().__init__(parameters, memory, home)
        self._sparse_as_dense = sparse_as_dense
        self._kept = [-1] * len(parameters)
        # Of each wanted parameter: its number, its gradient, and the version of that.
        self._owned: list[tuple[int, torch.Tensor, int]] = []
        self._absent: list[int] = []

    def keep(self, i: int) -> None:
        gradient = self.parameters[i].grad
        self._kept[i] = -1 if gradient is None else _version(gradient)

    def changed(self, fired: Sequence[int]) -> int | None:
        for i in fired:
            gradient = self.parameters[i].grad
            if gradient is not None and self._kept[i] not in (-1, _version(gradient)):
                return i
        return None

    def fill(self, wanted: Sequence[bool]) -> None:
        self._owned, self._absent = [], []
        owned, absent, sources = [], [], []
        for i, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if not wanted[i]:
                absent.append(i)
                continue
            if gradient is None:
                parameter.grad = gradient = torch.zeros_like(parameter, requires_grad=False)
            if gradient.is_sparse and not self._sparse_as_dense:
                raise SparseInBucket(i)
            sources.append(_fitting(gradient, parameter, self.places[i]))
            owned.append((i, gradient, _version(gradient)))
        with torch.no_grad():
            for i in absent:
                self.places[i].zero_()
            if sources:
                places = [self.places[i] for i, _, _ in owned] if absent else self.places
                torch._foreach_copy_(places, sources)
        self._owned, self._absent = owned, absent
        self._kept = [-1] * len(self._kept)

    def intact(self) -> bool:
        for i, gradient, version in self._owned:
            if self.parameters[i].grad is not gradient or _version(gradient) != version:
                return False
        return True

    def unload(self) -> None:
        places, gradients = [], []
        for i, gradient, _ in self._owned:
            if gradient.is_sparse:
                self.parameters[i].grad = self.places[i].to_sparse(gradient.sparse_dim())
            else:
                places.append(self.places[i])
                # .data: not a change that autograd, or another optimizer's reducer, should see
                gradients.append(gradient.data)
        if places:
            torch._foreach_copy_(gradients, places)
        self._owned = []

    def move_in(self) -> None:
        pass

    def give(self) -> None:
        for i in self._absent:
            self.parameters[i].grad = self.places[i].clone()


def make_buckets(
    pieces: Sequence[Parameters], views: bool, sparse_as_dense: bool, process_set: ProcessSet, lends: bool = False
) -> list[Bucket]:
    """Return a bucket for each piece. Collective over the set: their memory is shared where it can be.

    Args:
        pieces: parameters of one dtype each, the same on all ranks.
        lends: see `ViewBucket`.
    """
    lengths = [_nbytes(piece) for piece in pieces]
    starts = [0, *itertools.accumulate(-(-length // _ALIGN) * _ALIGN for length in lengths)]
    home = shared_buffer(starts[-1], process_set) if starts[-1] else None
    buckets: list[Bucket] = []
    for piece, start, length in zip(pieces, starts, lengths, strict=False):
        if home is None:
            memory = torch.zeros(length, dtype=torch.uint8)
        else:  # not slices of one tensor: they would share its version, and changes of one be changes of all
            memory = torch.from_numpy(home.array[start : start + length])
        memory = memory.view(piece[0].dtype)
        if views:
            buckets.append(ViewBucket(piece, memory, home, lends))
        else:
            buckets.append(CopyBucket(piece, memory, home, sparse_as_dense))
    return buckets


class Piece:
    """Parameters that travel together.

    Attributes:
        meant: they are one of the groups that the program asked for.
        bucketed: in a bucket.
    """

    def __init__(self, parameters: list[torch.Tensor], meant: bool, bucketed: bool) -> None:
        self.parameters, self.meant, self.bucketed = parameters, meant, bucketed


def cut_into_pieces(lists: Sequence[Parameters], views: bool, fusion_threshold: int) -> list[Piece]:
    """Split lists of parameters so that each piece has one dtype and one buffer's size, the last parameters first.

    backward() comes to them in about this order. Lists of one are neighbours that may share a buffer; longer ones were
    meant to stay together.

    Args:
        views: gradients are to live in buffers, also those of longer lists.
        fusion_threshold: of the bytes of what is copied to travel together; views are not copied.
    """
    limit = BUCKET_BYTES if views else min(BUCKET_BYTES, fusion_threshold)
    pieces: list[Piece] = []
    open_pieces: dict[torch.dtype, Piece] = {}
    for parameters in reversed(lists):
        if len(parameters) > 1:
            if not views:
                pieces.append(Piece(list(parameters), True, False))
                continue
            by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
            for p in parameters:
                by_dtype.setdefault(p.dtype, []).append(p)
            pieces.extend(Piece(piece, True, True) for piece in by_dtype.values())
            continue
        (p,) = parameters
        if p.nbytes >= min(ALONE_BYTES, limit):
            pieces.append(Piece([p], False, views))
            continue
        piece = open_pieces.get(p.dtype)
        if piece is None or _nbytes(piece.parameters) + p.nbytes > limit:
            piece = open_pieces[p.dtype] = Piece([], False, True)
            pieces.append(piece)
        piece.parameters.append(p)
    for piece in open_pieces.values():
        _shorten_last(pieces, piece)
    return pieces


def _shorten_last(pieces: list[Piece], last: Piece) -> None:
    """Cut what is long in two, the second part short."""
    nbytes, at = 0, len(last.parameters)
    while at > 0 and nbytes + last.parameters[at - 1].nbytes <= LAST_BYTES:
        at -= 1
        nbytes += last.parameters[at].nbytes
    if 0 < at < len(last.parameters):
        pieces.append(Piece(last.parameters[at:], last.meant, last.bucketed))
        del last.parameters[at:]


def _item_of(memory: torch.Tensor, home: SharedBuffer | None) -> Item:
    array = as_array(memory)
    return Item(array, array, value=memory, home=home)


def _nbytes(parameters: Parameters) -> int:
    return sum([p.nbytes for p in parameters])


def _version(gradient: torch.Tensor) -> int:
    return gradient._version


def _fitting(gradient: torch.Tensor, parameter: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return the gradient, dense."""
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    if gradient.dtype is not place.dtype or gradient.shape != place.shape:
        raise InvalidRequestError(
            f"a parameter became {describe(parameter)}, with a buffer for {describe(place)}: change dtypes and "
            "shapes before the optimizer is wrapped."
        )
    return gradient
