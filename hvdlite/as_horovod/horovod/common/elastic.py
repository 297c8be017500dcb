"""Elastic training, as far as it is the same for all frameworks."""

from hvdlite.elastic import ObjectState, State, run_fn

__all__ = ["ObjectState", "State", "run_fn"]
