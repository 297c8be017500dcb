"""The exchange of one step's gradients: started in buckets while the backward pass goes on, fetched all together.

A bucket is a node of the graph that starts the allreduce of its gradients and does not wait. Buckets go in the order in
which backward makes gradients, last variable first, and one node waits for all of them; `crossing` says why that cannot
deadlock. A node for each gradient would cost 25 us each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdlite import InvalidRequestError
from hvdlite.lowlevel import GroupHandle, Kind, refusing

from .compression import Compression, Compressor, check_compressor
from .crossing import refuse_xla
from .errors import as_tensorflows
from .naming import name_in_graph
from .ops import Reduction, start_allreduce
from .sparse import reduce_slices
from .tensors import as_array, as_tensor, to_tensor

Array = NDArray[Any]
Bundle = Sequence[int]  # places of gradients that become ready as one

# Small enough that most of the exchange can begin while backward goes on, large enough that the 50 us of a node count
# little beside the reduction (1 ms).
BUCKET_BYTES = 4 * 2**20


class How(NamedTuple):
    """How gradients are reduced.

    Attributes:
        groups: lists of places that are reduced together, or into how many such lists they are cut; None for neither.
    """

    reduction: Reduction
    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    groups: int | Sequence[Bundle] | None = None
    device_dense: str = ""
    device_sparse: str = ""


def exchange(gradients: Sequence[Any], names: Sequence[str], base: str, how: How) -> list[Any]:
    """Return the reduced gradients. Collective; eager, or nodes of the graph that is being built.

    Args:
        gradients: tensors or IndexedSlices; None stays None.
        names: one for each, unique.
        base: name of the exchange as a whole, which no other has that is under way at the same time.
    """
    if not tf.executing_eagerly():
        refuse_xla("the exchange of gradients")
        base = name_in_graph(base)
    results = list(gradients)
    dense: dict[int, tf.Tensor] = {}
    for i, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            with tf.device(how.device_sparse or None):
                results[i] = reduce_slices(gradient, f"{base}.{names[i]}", how.reduction)
        elif gradient is not None:
            dense[i] = gradient
    if dense:
        with tf.device(how.device_dense or None):
            full_names = {i: f"{base}.{names[i]}" for i in dense}
            for i, reduced in _exchange_dense(dense, full_names, base, how).items():
                results[i] = reduced
    return results


def bundles_of(places: Sequence[int], groups: int | Sequence[Bundle] | None) -> list[Bundle]:
    """Return which of `places` become ready together."""
    if groups is None:
        return [[place] for place in places]
    if isinstance(groups, int):
        return [part.tolist() for part in np.array_split(np.asarray(places), min(groups, len(places))) if part.size]
    known = set(places)
    lists: list[Bundle] = [[place for place in group if place in known] for group in groups]
    named = set(itertools.chain(*lists))
    return [group for group in lists if group] + [[place] for place in places if place not in named]


def buckets_of(bundles: Sequence[Bundle], nbytes: dict[int, int], most: int = BUCKET_BYTES) -> list[list[Bundle]]:
    """Return the bundles, last first, in buckets that end with the bundle by which they reach `most` bytes."""
    buckets: list[list[Bundle]] = []
    full = most
    for bundle in sorted(bundles, key=max, reverse=True):
        if full >= most:
            buckets.append([])
            full = 0
        buckets[-1].append(bundle)
        full += sum(nbytes[place] for place in bundle)
    return buckets


def _exchange_dense(
    gradients: dict[int, tf.Tensor], names: dict[int, str], base: str, how: How
) -> dict[int, tf.Tensor]:
    all_names = list(names.values())
    with as_tensorflows(), refusing(Kind.ALLREDUCE, all_names, how.reduction.process_set):
        check_compressor(how.compression)
        pairs = {i: how.compression.compress(as_tensor(gradient)) for i, gradient in gradients.items()}
    nbytes = {i: _nbytes(tensor) for i, (tensor, _) in pairs.items()}
    buckets = buckets_of(bundles_of(list(pairs), how.groups), nbytes)
    order = [place for bucket in buckets for bundle in bucket for place in bundle]
    starts = [_Bucket(bucket, names, how.reduction) for bucket in buckets]
    inputs = [[pairs[place][0] for bundle in bucket for place in bundle] for bucket in buckets]
    if tf.executing_eagerly():
        with as_tensorflows():
            started = [start(*map(as_array, tensors)) for start, tensors in zip(starts, inputs, strict=True)]
            reduced = [to_tensor(array) for array in _wait_for_all(started)]
    else:
        reduced = _nodes(starts, inputs, base)
    return {
        place: how.compression.decompress(tensor, pairs[place][1]) for place, tensor in zip(order, reduced, strict=True)
    }


def _nodes(
    starts: Sequence[Callable[..., list[GroupHandle]]], inputs: Sequence[Sequence[tf.Tensor]], base: str
) -> list[tf.Tensor]:
    """Put the buckets and the wait for all of them into the graph."""
    node = "hvdlite_" + "".join(c if c.isalnum() or c in "_." else "_" for c in base)
    desk = _Desk(starts)
    tickets = [
        tf.numpy_function(lambda *arrays, at=i: desk.start(at, arrays), list(tensors), tf.int64, name=f"{node}_bucket")
        for i, tensors in enumerate(inputs)
    ]
    flat = [tensor for tensors in inputs for tensor in tensors]
    reduced = tf.numpy_function(desk.finish, tickets, [tensor.dtype for tensor in flat], name=f"{node}_wait")
    for tensor, result in zip(flat, reduced, strict=True):
        result.set_shape(tensor.shape)
    return list(reduced)


class _Bucket:
    """Starts the allreduce of some gradients."""

    def __init__(self, bundles: Sequence[Bundle], names: dict[int, str], reduction: Reduction) -> None:
        # Runs of single gradients go in one call.
        self._runs: list[tuple[list[str], bool]] = []
        for is_group, run in itertools.groupby(bundles, key=lambda bundle: len(bundle) > 1):
            lists = [[names[place] for place in bundle] for bundle in run]
            self._runs += [(one, True) for one in lists] if is_group else [(list(itertools.chain(*lists)), False)]
        self._reduction = reduction

    def __call__(self, *arrays: Array) -> list[GroupHandle]:
        started, at = [], 0
        for names, grouped in self._runs:
            part = arrays[at : at + len(names)]
            started.append(start_allreduce(part, names, self._reduction, grouped))
            at += len(names)
        return started


class _Desk:
    """Where the buckets of one exchange in a graph are handed in and fetched. Runs of the graph may overlap."""

    def __init__(self, starts: Sequence[Callable[..., list[GroupHandle]]]) -> None:
        self._starts = starts
        self._tickets = itertools.count(1)
        self._started: dict[int, list[GroupHandle]] = {}

    def start(self, at: int, arrays: Sequence[Array]) -> Any:
        ticket = next(self._tickets)
        started = self._started[ticket] = self._starts[at](*arrays)
        started[-1].alert()
        return np.int64(ticket)

    def finish(self, *tickets: Any) -> list[Array]:
        return _wait_for_all([self._started.pop(int(ticket)) for ticket in tickets])


def _wait_for_all(started: Sequence[Sequence[GroupHandle]]) -> list[Array]:
    """Wait for all, also when one fails, so that nothing is in flight afterwards."""
    first_error: Exception | None = None
    results: list[Array] = []
    for handle in itertools.chain(*started):
        try:
            results += handle.wait()
        except Exception as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error
    return results


def _nbytes(tensor: tf.Tensor) -> int:
    """Bytes of a tensor; of one whose shape is not known yet, those of a whole bucket."""
    n = tensor.shape.num_elements()
    return BUCKET_BYTES if n is None else n * int(tensor.dtype.size)


def check_groups(groups: Any) -> None:
    """Raise unless this can be a number of groups, or lists of variables."""
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups > 0):
        return
    if not isinstance(groups, list | tuple) or not all(isinstance(group, list | tuple) for group in groups):
        raise InvalidRequestError(f"groups={groups!r:.80}: expected a positive number or a list of lists of variables.")
