"""A logger for training scripts: one rank tells the story, all ranks tell of trouble."""

from __future__ import annotations

import logging
from collections.abc import Container, MutableMapping
from typing import TYPE_CHECKING, Any

from hvdlite import is_initialized, rank

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # takes no parameter before Python 3.11


def get_logger(name: str = "train", ranks: Container[int] = (0,)) -> RankLogger:
    """Return the logger `name`, which puts the rank before each message. Not collective.

    Where logging is not configured for it, it writes to stderr from level INFO on.

    Args:
        ranks: those that log below WARNING. All log warnings and errors, and everything before `init()`.
    """
    logger = logging.getLogger(name)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False  # else a handler that the root gets later prints every line twice
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    return RankLogger(logger, ranks)


class RankLogger(_Adapter):
    """Has the methods of `logging.Logger`. Made by `get_logger`."""

    def __init__(self, logger: logging.Logger, ranks: Container[int]) -> None:
        super().__init__(logger, {})
        self.ranks = ranks

    def isEnabledFor(self, level: int) -> bool:
        """Return whether a message of `level` is written on this rank, now."""
        speaks = level >= logging.WARNING or not is_initialized() or rank() in self.ranks
        return speaks and super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank before a message."""
        return f"[rank {rank() if is_initialized() else '?'}] {msg}", kwargs
