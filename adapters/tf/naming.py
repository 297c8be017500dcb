"""Under which names operations of a graph travel: equal on all ranks, and the same when a function is traced again."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from hvdlite import ProcessSet
from hvdlite.lowlevel import name_for

_NUMBER = re.compile(r"_\d+$")
_NAMES = "hvdlite_names"  # collection of a graph


def operation_name(kind: str, name: str | None, tensor: Any, ignore_scope: bool, process_set: ProcessSet) -> str:
    """Return the name of one operation: as given, counted if eager, and in a graph from where its tensor stands."""
    if name is not None or tf.executing_eagerly():
        return name_for(kind, name, process_set)
    own = re.sub(r"\W", "_", tensor.name)
    return name_in_graph(f"{kind}.{own.rpartition('/')[2] if ignore_scope else own}")


def name_in_graph(base: str) -> str:
    """Return `base` with the function's name, and a number if this function has had it before.

    The number that TensorFlow gives to branches and loops counts all that this process has traced, so it is left out.
    """
    graph = tf.compat.v1.get_default_graph()
    function = _NUMBER.sub("", getattr(graph, "name", "graph"))
    name = f"{function}/{base}"
    given = graph.get_collection_ref(_NAMES)
    given.append(name)
    n = given.count(name)
    return name if n == 1 else f"{name}.{n}"
