"""An optimizer of a new class that takes over everything of another one: what all distributed optimizers are."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch


class Wrapping(Protocol):
    """What a wrapped optimizer has besides what an optimizer has."""

    original: torch.optim.Optimizer


class Wrapped(torch.optim.Optimizer):
    """What is put in front of an optimizer's class, by `wrap` only."""

    _wrapping: Wrapping

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` of this class of optimizer, wrapped or not, returned."""
        super().load_state_dict(state_dict)
        # Loading makes new groups, and a scheduler of the original optimizer is to change these.
        self._wrapping.original.param_groups, self._wrapping.original.state = self.param_groups, self.state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return an optimizer of this kind over copies of the parameters. Every rank must do so."""
        copied = copy.deepcopy(self._bare(), memo)
        twins = {
            p: twin
            for mine, theirs in zip(self.param_groups, copied.param_groups, strict=True)
            for p, twin in zip(mine["params"], theirs["params"], strict=True)
        }
        memo[id(self)] = twin = self._like_this(copied, twins)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an optimizer of the original class: whoever reads it may have one rank, or other ones."""
        return _same, (self._bare(),)

    def _like_this(self, optimizer: torch.optim.Optimizer, twins: dict[torch.Tensor, torch.Tensor]) -> Any:
        """Wrap `optimizer` like this one. `twins` has its parameter for each of ours."""
        raise NotImplementedError

    def _bare(self) -> torch.optim.Optimizer:
        """Return an optimizer of the original class with the same groups and state."""
        base = type(self._wrapping.original)
        bare = base.__new__(base)
        bare.__dict__.update({name: value for name, value in vars(self).items() if name not in ("_wrapping", "step")})
        return bare


def wrap(optimizer: torch.optim.Optimizer, front: type[Wrapped], wrapping: Wrapping) -> Any:
    """Return an instance of the class of `optimizer` with `front` before it, that shares its groups and its state."""
    base = type(optimizer)
    made: Any = type(base.__name__, (front, base), {"__module__": front.__module__, "__doc__": base.__doc__})
    # Not made by its constructor, whose arguments nobody knows: it takes over what the optimizer has.
    wrapped = made.__new__(made)
    inherited = {name: value for name, value in vars(optimizer).items() if name != "step"}  # a scheduler's wrapper
    wrapped.__dict__.update(inherited, _wrapping=wrapping)
    return wrapped


def _same(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer
