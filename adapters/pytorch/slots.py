"""What a reducer keeps of each parameter, which of them travel together, and how it hears of gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvdlite import InvalidRequestError

from .buckets import Bucket

if TYPE_CHECKING:
    from .exchange import Exchange


class Slot:
    """One parameter.

    Attributes:
        name: under which its gradient travels.
        sparse: on some rank its gradients are sparse.
        left: backward passes until its gradient starts.
        wanted: it was not frozen when this round began.
        fired: it got a gradient in this round.
        cleared: there was no gradient before the one that it is about to get.
    """

    __slots__ = ("_version", "cleared", "fired", "left", "name", "parameter", "sparse", "wanted")

    def __init__(self, parameter: torch.Tensor, name: str, sparse: bool = False) -> None:
        self.parameter, self.name, self.sparse = parameter, name, sparse
        self.left, self.wanted, self.fired, self.cleared = 1, True, False, True
        self._version = 0

    def zeros(self) -> torch.Tensor:
        """Return a gradient of a parameter that took no part."""
        parameter = self.parameter
        if not self.sparse:
            return torch.zeros_like(parameter, requires_grad=False)
        indices, values = torch.empty((1, 0), dtype=torch.int64), torch.empty((0, *parameter.shape[1:]))
        return torch.sparse_coo_tensor(indices, values.to(parameter.dtype), parameter.shape, check_invariants=False)

    def see(self) -> None:
        """Remember the state of the gradient."""
        gradient = self.parameter.grad
        self._version = -1 if gradient is None else gradient._version

    def changed(self) -> bool:
        """Return whether the gradient was changed in place since it was last seen."""
        gradient = self.parameter.grad
        return gradient is not None and self._version not in (-1, gradient._version)


class Bundle:
    """Parameters whose gradients start together.

    Attributes:
        bucket: the buffer in which they travel.
        exchange: how they are reduced, if not by an allreduce.
        loose: they only happen to start together, each as if it were alone.
        started: they are under way in this round.
        unready: how many are still waited for.
        nbytes: of all gradients.
    """

    __slots__ = ("bucket", "exchange", "loose", "name", "nbytes", "slots", "started", "unready")

    def __init__(self, slots: Sequence[Slot], bucket: Bucket | None = None, exchange: Exchange | None = None) -> None:
        self.slots, self.bucket, self.exchange, self.loose = slots, bucket, exchange, False
        self.name = slots[0].name if bucket is None else f"{slots[0].name}+{len(slots) - 1}"
        self.nbytes = sum([slot.parameter.nbytes for slot in slots])
        self.started, self.unready = False, 0

    def begin(self, passes: int) -> None:
        """Begin a round: what is frozen now takes no part in it."""
        self.started, unready = False, 0
        self.release()
        for slot in self.slots:
            slot.left, slot.fired = passes, False
            slot.wanted = wanted = slot.parameter.requires_grad
            unready += wanted
        self.unready = unready

    @property
    def single(self) -> bool:
        """Whether each gradient counts as under way once it is ready: only we made it wait for others."""
        return self.loose or (self.bucket is not None and not self.bucket.views)

    def wanted(self) -> bool:
        """Return whether any of it takes part in this round."""
        return any(slot.wanted for slot in self.slots)

    def take(self, i: int, passes: int) -> None:
        """Member i has a further gradient; the first of `passes` if the one before was cleared."""
        slot = self.slots[i]
        if slot.fired and slot.cleared and slot.left < passes:
            self.unready += slot.wanted and slot.left <= 0
            slot.left = passes
        if not slot.wanted:  # unfrozen after the round began
            slot.wanted = True
            self.unready += 1
        slot.fired = True

    def keep(self, i: int) -> None:
        """The gradient of member i will not start before backward() returns: see to it that a change is noticed."""
        if self.bucket is not None:
            self.bucket.keep(i)
        else:
            self.slots[i].see()

    def keep_all(self) -> None:
        """As `keep`, for all that have come in this round."""
        for i, slot in enumerate(self.slots):
            if slot.fired:
                self.keep(i)

    def changed(self) -> str:
        """Return the name of a gradient of this round that was changed in place since it was kept, or ""."""
        fired = [i for i, slot in enumerate(self.slots) if slot.fired]
        if self.bucket is None:
            return next((self.slots[i].name for i in fired if self.slots[i].changed()), "")
        i = self.bucket.changed(fired) if fired else None
        return "" if i is None else self.slots[i].name

    def release(self) -> None:
        """Let go of memory that the last round has left."""
        if self.bucket is not None:
            self.bucket.release()

    def dissolve(self) -> None:
        """Some gradient is sparse on some rank: from now on each travels for itself."""
        self.bucket, self.loose = None, True


class GradientHook:
    """Hears of each gradient of a parameter, before and after it is added to what is there.

    It knows nothing but a number: what a parameter's hooks hold is never freed if that holds the parameter.
    """

    def __init__(self, reducer: Any, number: int) -> None:
        self._find, self._number = weakref.ref(reducer), number

    @property
    def reducer(self) -> Any:
        """The reducer, or None if its optimizer is gone."""
        return self._find()

    def before(self, _: torch.Tensor) -> None:
        reducer = self._find()
        if reducer is not None:
            reducer.before_gradient(self._number)

    def __call__(self, _: torch.Tensor) -> None:
        reducer = self._find()
        if reducer is not None:
            reducer.on_gradient(self._number)

    def attach(self, parameter: torch.Tensor) -> None:
        """Hear of the parameter's gradients, also of one that is frozen now: it may not stay so."""
        frozen = not parameter.requires_grad
        if frozen and not parameter.is_floating_point():
            return
        parameter.requires_grad_(True)
        parameter.register_hook(self.before)
        parameter.register_post_accumulate_grad_hook(self)
        parameter.requires_grad_(not frozen)


def detach_older(parameters: Sequence[torch.Tensor], may_share: Callable[[Any], bool]) -> None:
    """Take the hooks of older optimizers off `parameters`: of those that are gone, or that have the same ones.

    Args:
        may_share: says of an older reducer that has some of the parameters whether both may reduce them.

    Raises:
        InvalidRequestError: they may not.
    """
    mine = set(parameters)
    for parameter in parameters:
        both: list[Any] = [parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)]
        for hooks in filter(None, both):
            for key, hook in [(key, _ours(hook)) for key, hook in hooks.items()]:
                if hook is None:
                    continue
                older = hook.reducer
                if older is None or mine >= set(older.parameters()):
                    del hooks[key]
                elif not may_share(older):
                    raise InvalidRequestError(
                        f"a parameter of shape {list(parameter.shape)} is in another distributed optimizer, too, and "
                        "would be reduced twice. Two may share parameters only with op=Average, over one process set, "
                        "and without gradient_as_bucket_view."
                    )


def refuse_sparse(slots: Sequence[Slot]) -> None:
    """Raise if a gradient cannot be a view into a buffer."""
    for slot in slots:
        if slot.parameter.grad is not None and slot.parameter.grad.is_sparse:
            raise InvalidRequestError(
                f"{slot.name!r}: a sparse gradient cannot be a view into a buffer: "
                "pass sparse_as_dense=True, or gradient_as_bucket_view=False."
            )


def _ours(hook: Any) -> GradientHook | None:
    hook = getattr(hook, "__self__", hook)  # `before` is a bound method
    return hook if isinstance(hook, GradientHook) else None
