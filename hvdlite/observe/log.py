"""The log: the standard library's logger named `hvdlite`, with the rank in front of each line.

Importing sets nothing up. `configure` is called by `init()`; a program that gave the logger
handlers of its own before that keeps them, and gets the records instead of stderr.

hvdlite itself logs warnings and errors, and at level info that a timeline is not running.
"""

from __future__ import annotations

import logging
import sys

from hvdlite.config import Config

TRACE = 5  # below DEBUG; the level that Horovod calls trace

LEVELS = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}


def get_logger() -> logging.Logger:
    """Return the logger of hvdlite. Its records reach stderr after `configure`."""
    return logging.getLogger("hvdlite")


def configure(rank: int, config: Config) -> None:
    """Let the log of this process go to stderr as `hvdlite[rank 1]: text`. Calling again replaces the rank."""
    logger = get_logger()
    unconfigure()
    logging.addLevelName(TRACE, "TRACE")
    logger.setLevel(LEVELS[config.log_level])
    if logger.handlers:
        return
    logger.addHandler(StderrHandler(rank, show_time=not config.log_hide_time))
    logger.propagate = False  # else a program with a root handler prints every line twice


def unconfigure() -> None:
    """Take back what `configure` did. Handlers of others stay."""
    logger = get_logger()
    for handler in [one for one in logger.handlers if isinstance(one, StderrHandler)]:
        logger.removeHandler(handler)
        logger.propagate = True


class StderrHandler(logging.Handler):
    """Writes each record in one piece to whatever `sys.stderr` is at that moment."""

    def __init__(self, rank: int, show_time: bool) -> None:
        super().__init__()
        time = "%(asctime)s " if show_time else ""
        self.setFormatter(logging.Formatter(f"{time}%(levelname)s hvdlite[rank {rank}]: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")  # one write: lines of several ranks do not mix
            sys.stderr.flush()
        except Exception:  # as logging.Handler.emit has to
            self.handleError(record)
