"""What a distributed optimizer has besides what an optimizer has: settings, a reducer, and what travels together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from hvdlite import ProcessSet
from hvdlite.lowlevel import ReduceOp, fusion_threshold, name_for

from .buckets import Piece, cut_into_pieces, make_buckets
from .compression import CommHook, Compressor, NoneCompressor, describe_compression
from .exchange import Exchange, cut_into_batches
from .ops import Reduction
from .reducer import GradientReducer
from .slots import Bundle, Slot


class Settings(NamedTuple):
    """What `DistributedOptimizer` was asked for."""

    op: ReduceOp
    predivide: float
    compression: type[Compressor] | CommHook
    passes: int
    process_set: ProcessSet
    sparse_as_dense: bool
    views: bool

    def described(self) -> dict[str, str]:
        """Return what must be equal on all ranks, by the name of the argument."""
        return {
            "op": self.op.name.title(),
            "gradient_predivide_factor": str(self.predivide),
            "compression": describe_compression(self.compression),
            "backward_passes_per_step": str(self.passes),
            "sparse_as_dense": str(self.sparse_as_dense),
            "gradient_as_bucket_view": str(self.views),
        }

    def reduction(self) -> Reduction:
        return Reduction(self.op, 1 / self.predivide, self.predivide, self.process_set)


class Wrapping:
    """What a distributed optimizer has besides what an optimizer has.

    Attributes:
        original: the optimizer that was wrapped.
        lists: parameters that are reduced together.
        together: small gradients may travel in one buffer.
        hooked: the compression is a hook.
        exchanges: those of a compression that is a hook.
        reducer: None where there is nothing to reduce with.
        synchronized: the round in which synchronize() was called, counted from the last step; 0 if it was not.
        skipping: within skip_synchronize().
    """

    def __init__(
        self,
        original: torch.optim.Optimizer,
        settings: Settings,
        name_of: dict[torch.Tensor, str],
        lists: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        self.original, self.settings, self.name_of, self.lists = original, settings, name_of, lists
        self.name = name_for("optimizer", None, settings.process_set)
        self.synchronized, self.skipping = 0, False
        # SparseAdam wants sparse gradients, also of what took no part.
        self.sparse = isinstance(original, torch.optim.SparseAdam)
        # The batches of a hook stay what they are: what it holds back belongs to them.
        self.hooked = isinstance(settings.compression, CommHook)
        copied = getattr(settings.compression, "elementwise", False) and not self.sparse and not self.hooked
        self.together = settings.views or copied
        self.exchanges: list[Exchange] = []
        self.reducer: GradientReducer | None = None
        if settings.process_set.included() and settings.process_set.size() != 1:
            one_by_one = NoneCompressor if isinstance(settings.compression, CommHook) else settings.compression
            self.reducer = GradientReducer(
                self.name, self.bundles(lists), settings.reduction(), one_by_one, settings.passes,
                settings.sparse_as_dense, self.regroup if self.together and not self.hooked else None,
            )  # fmt: skip

    def bundles(self, lists: Sequence[Sequence[torch.Tensor]]) -> list[Bundle]:
        """Return what the reducer needs to know of parameters. Collective."""
        process_set = self.settings.process_set
        pieces = self._cut(lists)
        slots = {
            p: Slot(p, _travel_name(self.name_of[p], process_set), self.sparse)
            for piece in pieces
            for p in piece.parameters
        }
        return self._bundles_of(pieces, slots)

    def regroup(self, ready: Sequence[Slot]) -> list[Bundle] | None:
        """Return bundles in which slots are together that become ready together; None if they are now. Collective.

        Args:
            ready: all, in order.
        """
        slots = {slot.parameter: slot for slot in ready}
        grouped = [one for one in self.lists if len(one) > 1]
        alone = {one[0] for one in self.lists if len(one) == 1}
        pieces = self._cut([*grouped, *([p] for p in reversed(slots) if p in alone)])
        if {frozenset(p.parameters) for p in pieces} == {frozenset(p.parameters) for p in self._cut(self.lists)}:
            return None
        if any(slot.sparse for slot in ready):  # then some travel alone by now
            return None
        bundles = self._bundles_of(pieces, slots)
        for bundle in bundles:
            if bundle.bucket is not None:
                bundle.bucket.move_in()
        return bundles

    def _cut(self, lists: Sequence[Sequence[torch.Tensor]]) -> list[Piece]:
        if self.together:
            return cut_into_pieces(lists, self.settings.views, fusion_threshold())
        return [Piece(list(one), True, False) for one in (cut_into_batches(lists) if self.hooked else lists)]

    def _bundles_of(self, pieces: Sequence[Piece], slots: Mapping[torch.Tensor, Slot]) -> list[Bundle]:
        settings = self.settings
        buckets = iter(
            make_buckets(
                [piece.parameters for piece in pieces if piece.bucketed], settings.views, settings.sparse_as_dense,
                settings.process_set, settings.compression is NoneCompressor,
            )
        )  # fmt: skip
        bundles = []
        for piece in pieces:
            members = [slots[p] for p in piece.parameters]
            bundles.append(Bundle(members, next(buckets) if piece.bucketed else None, self._exchange(members)))
        return bundles

    def _exchange(self, slots: Sequence[Slot]) -> Exchange | None:
        """Return how these are reduced, if not by an allreduce."""
        hook, first = self.settings.compression, slots[0]
        if not isinstance(hook, CommHook) or not first.parameter.is_floating_point():
            return None
        exchange = Exchange(f"{first.name}+{len(slots) - 1}", hook, self.settings.reduction())
        self.exchanges.append(exchange)
        return exchange


def _travel_name(name: str, process_set: ProcessSet) -> str:
    """Return a name that no other optimizer uses: parameters of two models are often called the same."""
    n = int(name_for(f"gradient.{name}", None, process_set).rpartition(".")[2])
    return f"gradient.{name}" if n == 1 else f"gradient.{name}.{n}"
