"""TorchState: models, optimizers and samplers among what an elastic training loop remembers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

import hvdlite
from hvdlite.elastic import ObjectState, refuse_names_of_methods
from hvdlite.torch.state import broadcast_optimizer_state, broadcast_parameters

from .sampler import ElasticSampler


class StateHandler:
    """Remembers one value of a TorchState. Subclasses say how.

    Attributes:
        value: the model, optimizer, ….
        saved: what `save()` has remembered; has to be picklable for a job that is started again.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.saved: Any = None

    def save(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Take another one, and remember it as it is."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """Of anything with `state_dict()` and `load_state_dict()`: schedulers and gradient scalers among them."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self.saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def sync(self) -> None:
        self._get_from_rank_0()
        self.save()

    def _get_from_rank_0(self) -> None:
        state = hvdlite.broadcast_object(self.value.state_dict(), 0)
        if hvdlite.rank() != 0:
            self.value.load_state_dict(state)


class ModelStateHandler(_StateDictHandler):
    """Of a `torch.nn.Module`."""

    def _get_from_rank_0(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_StateDictHandler):
    """Of a `torch.optim.Optimizer`, wrapped or not."""

    def _get_from_rank_0(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(_StateDictHandler):
    """Of an `ElasticSampler`, which deals out anew among the ranks there are."""

    def _get_from_rank_0(self) -> None:
        self.value.load_state_dict(hvdlite.broadcast_object(self.value.state_dict(), 0))


class _Registry:
    """Horovod's API has one for all states, which programs may replace."""

    def __init__(self) -> None:
        self.entries: list[tuple[type, type[StateHandler]]] = [
            (torch.nn.Module, ModelStateHandler),
            (torch.optim.Optimizer, OptimizerStateHandler),
            (ElasticSampler, SamplerStateHandler),
        ]


_REGISTRY = _Registry()


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return which class of values is remembered how; the first that fits counts."""
    return _REGISTRY.entries


def set_handler_registry(registry: Sequence[tuple[type, type[StateHandler]]]) -> None:
    """Replace what `get_handler_registry()` returns, for states that are made from now on."""
    _REGISTRY.entries = list(registry)


class TorchState(ObjectState):
    """What an elastic training loop with torch remembers.

        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)

    `save()` copies the state_dict of each model, optimizer, `ElasticSampler`, and of whatever else has `state_dict()`
    and `load_state_dict()`; other values are plain attributes, copied deeply. All can be read and set as attributes.
    One that has a state_dict is saved at once when it is set.

    Args:
        model, optimizer: as any other.
        kwargs: names and values.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        refuse_names_of_methods(self, kwargs)
        values = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: handler(value) for name, value in values.items() if (handler := _handler_of(value))}
        self.__dict__["_handlers"] = handlers
        super().__init__(None, None, **{name: value for name, value in values.items() if name not in handlers})

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def to_commit(self) -> Any:
        return {"handled": {name: handler.saved for name, handler in self._handlers.items()}, "plain": self._saved}

    def from_commit(self, content: Any) -> None:
        for name, handler in self._handlers.items():
            if content["handled"].get(name) is not None:
                handler.saved = content["handled"][name]
        super().from_commit(content["plain"])

    def __getattr__(self, name: str) -> Any:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers:
            return handlers[name].value
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        else:
            super().__setattr__(name, value)


def _handler_of(value: Any) -> type[StateHandler] | None:
    for kind, handler in _REGISTRY.entries:
        if isinstance(value, kind):
            return handler
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return _StateDictHandler
    return None
