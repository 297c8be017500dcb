"""The gradients of one round that are under way, from the moment they start until they have landed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite.lowlevel import Kind, refusing, start

from .buckets import SparseInBucket
from .compression import Compressor
from .exchange import Exchanges
from .ops import Reduction, start_allgather
from .pulse import Pulse
from .slots import Bundle, Slot, refuse_sparse
from .sparse import start_sparse_allreduce
from .trips import (
    CHANGED,
    Announcement,
    BucketTrip,
    DenseTrip,
    DensifiedTrip,
    OrderError,
    SparseElsewhere,
    SparseTrip,
    Trip,
)

_Batched = BucketTrip | DenseTrip | DensifiedTrip | Pulse

# Gradients wait for each other until they have so many bytes, then start together: to wake the engine for each of
# a hundred small ones costs more than the rest of the reduction.
BATCH_BYTES = 2**20


class Fleet:
    """Starts gradients together, and waits for all of them, whatever becomes of each.

    Args:
        sparse_as_dense: sparse gradients travel as dense ones.
        overlaps: gradients start while backward() still runs. Otherwise all start together when it ends.

    Attributes:
        error: the first of what went wrong. The other ranks wait for our other gradients, so nothing is raised.
    """

    def __init__(
        self, reduction: Reduction, compression: type[Compressor], sparse_as_dense: bool, overlaps: bool
    ) -> None:
        self.error: Exception | None = None
        self.overlaps = overlaps
        self._reduction, self._compression, self._sparse_as_dense = reduction, compression, sparse_as_dense
        self._trips: list[Trip] = []
        self._exchanges = Exchanges(sparse_as_dense, self.note)
        self._batch: list[_Batched] = []
        self._batch_bytes = 0
        self._spare: list[tuple[Slot, torch.Tensor]] = []  # what frozen members of groups are on other ranks

    @property
    def under_way(self) -> bool:
        return bool(self._trips or self._batch or self._exchanges)

    def note(self, error: Exception) -> None:
        """Keep an error for the end, if it is the first."""
        self.error = self.error or error

    def begin(self) -> None:
        """Nothing is under way."""
        self._trips, self._batch, self._batch_bytes, self._spare = [], [], 0, []
        self._exchanges.begin()

    def start(self, bundle: Bundle) -> None:
        """Let the gradients of a bundle go: a group by itself, a single one or a buffer with its neighbours."""
        bundle.started = True
        if bundle.exchange is not None:
            self._depart(bundle)
            return
        names = [bundle.name] if bundle.bucket is not None else [slot.name for slot in bundle.slots]
        try:
            with refusing(Kind.ALLREDUCE, names, self._reduction.process_set):
                trips = self._trips_of(bundle)
        except Exception as error:
            self.note(error)
            return
        if bundle.bucket is None and len(bundle.slots) > 1 and not bundle.loose:
            self._submit(trips, grouped=True)
            return
        self._batch += trips
        self._batch_bytes += bundle.nbytes
        if self._batch_bytes >= BATCH_BYTES and self.overlaps:
            self.flush()

    def _depart(self, bundle: Bundle) -> None:
        """Let a batch that has an exchange go, and those that are sparse in it beside it."""
        for slot in self._exchanges.depart(bundle, self._spare):
            self._go_alone(slot)

    def _go_alone(self, slot: Slot) -> None:
        try:
            with refusing(Kind.ALLREDUCE, [slot.name], self._reduction.process_set):
                self._batch += self._dense_trips(slot)
        except Exception as error:
            self.note(error)

    def send(self, pulse: Pulse, alert: bool) -> None:
        """Let a pulse go, with all that waits for neighbours.

        Args:
            alert: nobody waits for it at once.
        """
        self._batch.append(pulse)
        self.flush(alert)

    def _trips_of(self, bundle: Bundle) -> list[_Batched]:
        if bundle.bucket is None:
            return [trip for slot in bundle.slots for trip in self._dense_trips(slot)]
        if bundle.bucket.views and not self._sparse_as_dense:
            refuse_sparse(bundle.slots)
        try:
            bundle.bucket.fill([slot.wanted for slot in bundle.slots])
        except SparseInBucket:
            self._announce_sparse(bundle)
            return []
        return [BucketTrip(bundle, self._compression)]

    def _dense_trips(self, slot: Slot) -> list[_Batched]:
        """Return the trip of a gradient that travels dense; start that of one that does not."""
        parameter = slot.parameter
        if parameter.grad is None:
            zeros = slot.zeros()
            if not slot.wanted and not slot.sparse:  # frozen; but its group needs it
                self._spare.append((slot, zeros))
                return [DenseTrip(slot.name, [], zeros, self._compression)]
            parameter.grad = zeros
        if self._sparse_as_dense and parameter.grad.is_sparse:
            return [DensifiedTrip(slot.name, parameter, self._compression)]
        if slot.sparse and not self._sparse_as_dense:
            self._start_sparse(slot)
        elif parameter.grad.is_sparse:
            self._announce_sparse(slot)
        else:
            return [DenseTrip(slot.name, [(parameter, parameter.grad)], parameter.grad, self._compression, slot)]
        return []

    def _announce_sparse(self, who: Slot | Bundle) -> None:
        """Tell the ranks that do not know yet. What they send under this name fails, and then they do."""
        slot = who if isinstance(who, Slot) else who.slots[0]
        nothing = torch.empty(0, dtype=slot.parameter.dtype)
        handle = start_allgather([nothing], [who.name], self._reduction.process_set)[0]
        handle.alert()
        self._trips.append(Announcement(handle, who))

    def _start_sparse(self, slot: Slot) -> None:
        gradient = slot.parameter.grad
        assert gradient is not None
        if not gradient.is_sparse:
            slot.parameter.grad = gradient = gradient.to_sparse(1)
        handle = start_sparse_allreduce(gradient, slot.name, self._reduction)
        handle.alert()
        self._trips.append(SparseTrip(slot.name, slot.parameter, handle))

    def flush(self, alert: bool = True) -> None:
        """Let those go that wait for neighbours."""
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        self._submit(batch, grouped=False, alert=alert)

    def _submit(self, batch: Sequence[_Batched], grouped: bool, alert: bool = True) -> None:
        if not batch:
            return
        op, prescale, postscale, process_set = self._reduction
        names = [one.name for one in batch]
        try:
            with refusing(Kind.ALLREDUCE, names, process_set):
                items = [one.item() for one in batch]
            handles = start(
                Kind.ALLREDUCE, names, items, process_set,
                op=op, prescale=prescale, postscale=postscale, grouped=grouped,
            )  # fmt: skip
        except Exception as error:
            self.note(error)
            return
        if alert:
            handles[-1].alert()
        for one, handle in zip(batch, handles, strict=True):
            one.handle = handle
            if not isinstance(one, Pulse):
                self._trips.append(one)

    def land(self) -> None:
        """Wait for everything under way, and put it in place."""
        for slot in self._exchanges.land():
            self._go_alone(slot)
        self.flush()
        found = self._land_trips()
        for bundle in found:
            if isinstance(bundle, Bundle):
                self._part(bundle)
        self.flush()
        for who in [one for one in found if isinstance(one, Slot)] + self._land_trips():
            assert isinstance(who, Slot)
            who.sparse = True
            try:
                self._start_sparse(who)
            except Exception as error:
                self.note(error)
        self._land_trips()

    def _part(self, bundle: Bundle) -> None:
        """Let the gradients of a buffer go again, each for itself."""
        if bundle.bucket is not None and not bundle.bucket.intact():
            self.note(OrderError(f"{bundle.name!r}: {CHANGED}"))
        bundle.dissolve()
        for slot in bundle.slots:
            self._go_alone(slot)

    def give_to_frozen(self) -> None:
        """Let frozen members of groups have what other ranks trained."""
        for slot, reduced in self._spare:
            slot.parameter.grad = reduced

    def _land_trips(self) -> list[Slot | Bundle]:
        """Wait for what is in flight, and return whose gradients have turned out to be sparse."""
        trips, self._trips = self._trips, []
        sparse = []
        for trip in trips:
            try:
                trip.land()
            except SparseElsewhere as found:
                sparse.append(found.who)
            except Exception as error:
                self.note(error)
        return sparse
