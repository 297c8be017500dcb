"""hvd.elastic: for now only the sampler, which also serves to go on in the middle of an epoch after a restart."""

from __future__ import annotations

import sys
from typing import Any

from .sampler import ElasticSampler

__all__ = ["ElasticSampler"]

# What scripts for Horovod may ask for, and is still to come. Asking answers no (`hasattr` is False).
_LATER = ("ObjectState", "State", "TorchState", "run", "state")


def __getattr__(name: str) -> Any:
    if name in _LATER:
        # `from … import run` asks first from here, and shows the text of an ImportError only.
        importing = sys._getframe(1).f_code.co_name == "_handle_fromlist"
        raise (ImportError if importing else AttributeError)(
            f"hvd.elastic.{name} is not in this version of hvdlite; see README, 'What it is not, yet'."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
