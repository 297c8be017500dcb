"""Tunes while training runs: cuts what it hears into steps and samples, and asks for other sizes in between.

It listens on set rank 0 only. What it wishes for reaches all ranks in a Verdict, so nobody has to agree on anything.
A *step* lasts until a name comes again; a *sample* is some steps of equal content, and its score the median of
their bytes per second. Everything counts, also the computing: sizes that delay it are no gain.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, TextIO

from hvdlite.config import Config
from hvdlite.messages import Knobs
from hvdlite.observe.instrument import Instrument, Operation
from hvdlite.observe.log import get_logger
from hvdlite.tuning.search import Search

_SETTLE = 4  # steps after a change that do not count: the ranks learn their schedule anew, and caches fill
_MOST_NAMES = 100_000  # in one step; if none has come again by then, none will
_UNNAMED = ".noname."  # in the names of operations without one, which never come again

Content = tuple[int, int]  # names and bytes of a step


class Tuner(Instrument):
    """Measures, and says what it wants next (`take_wish`). Called by whoever drives the engine.

    Args:
        default: what runs at first.
        config: the settings named `autotune_…`.
        search_for: makes the Search for steps of so many bytes.
        found: what an earlier job has found; then nothing is measured.
        on_settled: told the result, its gain over the default as a share, and the bytes of a step.
    """

    def __init__(
        self,
        default: Knobs,
        config: Config,
        search_for: Callable[[int], Search],
        found: Knobs | None = None,
        on_settled: Callable[[Knobs, float, int], None] = lambda knobs, gain, step_bytes: None,
    ) -> None:
        self.knobs, self._default, self._config = found or default, default, config
        self._search_for, self._on_settled = search_for, on_settled
        self._wish = found if found != default else None
        self.settled = found is not None
        self._search: Search | None = None
        self._warming = config.autotune_warmup_samples
        self._content: Content | None = None  # of the steps that count
        self._last: Content | None = None
        self._odd = 0  # steps in a row that did not
        self._skip = _SETTLE
        self._rates: list[float] = []
        self._names: set[str] = set()
        self._nbytes, self._since = 0, -1.0
        self._log = _Log("" if self.settled else config.autotune_log)

    def take_wish(self) -> Knobs | None:
        """Return what is wanted from now on, once; None when nothing has changed."""
        if self._wish is None:
            return None
        wish, self._wish = self._wish, None
        return wish

    def operation(self, operation: Operation) -> None:
        if self.settled or not operation.nbytes:
            return
        names = [r.name for r in operation.responses if _UNNAMED not in r.name]
        if not self._names.isdisjoint(names) or len(self._names) > _MOST_NAMES:
            self._end_step(operation.started)
        elif self._since < 0:
            self._since = operation.started
        self._names.update(names)
        self._nbytes += operation.nbytes

    def ended(self) -> None:
        self._log.close()

    def _end_step(self, now: float) -> None:
        content, seconds = (len(self._names), self._nbytes), now - self._since
        self._names.clear()
        self._nbytes, self._since = 0, now
        same, self._last = content == self._last, content
        if content != self._content:
            self._odd += 1
            if self._content is None or self._odd > self._config.autotune_steps_per_sample:
                self._start_over(content if same else None)
            return
        self._odd = 0
        if self._skip:
            self._skip -= 1
            return
        self._rates.append(content[1] / seconds if seconds > 0 else 0.0)
        if len(self._rates) >= self._config.autotune_steps_per_sample:
            score = statistics.median(self._rates)
            self._rates.clear()
            self._end_sample(content[1], score)

    def _start_over(self, content: Content | None) -> None:
        """Measure steps of another content: what was found for the old one says nothing about it."""
        self._content, self._search, self._skip, self._odd = content, None, _SETTLE, 0
        self._rates.clear()
        self._want(self._default)

    def _end_sample(self, step_bytes: int, score: float) -> None:
        if self._warming:
            self._warming -= 1
            self._log.write(self.knobs, step_bytes, score, "warm-up")
            return
        if self._search is None:
            self._search = self._search_for(step_bytes)  # it begins with the default, but not with this sample
        else:
            self._log.write(self.knobs, step_bytes, score, "sample")
            self._search.tell(score)
        self._want(self._search.current)
        if self._search.done:
            self._settle(self._search, step_bytes)

    def _want(self, knobs: Knobs) -> None:
        if knobs != self.knobs:
            self.knobs = self._wish = knobs
            self._skip = _SETTLE

    def _settle(self, search: Search, step_bytes: int) -> None:
        self.settled = True
        better = {
            name: value for name, value in search.best._asdict().items() if value != getattr(search.default, name)
        }
        what = (
            ", ".join(f"{name}={value}" for name, value in better.items()) or "the defaults, nothing is clearly better"
        )
        gain = f" ({100 * search.gain:.1f} % faster)" if better else ""
        get_logger().info("autotune settled on %s%s, for steps of %d bytes.", what, gain, step_bytes)
        self._log.write(search.best, step_bytes, 0.0, "best")
        self._log.close()
        self._on_settled(search.best, search.gain, step_bytes)


class _Log:
    """What was measured, as CSV. A disc that fails ends the log, not the training."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: TextIO | None = None
        if path:
            self._try(self._open)

    def write(self, knobs: Knobs, step_bytes: int, score: float, what: str) -> None:
        fields = [int(value) for value in knobs]
        self._line([*fields, step_bytes, f"{score:.0f}" if score else "", what])

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            self._try(file.close)

    def _open(self) -> None:
        self._file = open(self._path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115  (kept until `close`)
        self._line([*Knobs._fields, "step_bytes", "bytes_per_second", "what"])

    def _line(self, fields: list[Any]) -> None:
        file = self._file
        if file is not None:
            self._try(lambda: file.write(",".join(map(str, fields)) + "\n"))

    def _try(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except OSError as error:
            self._file = None
            get_logger().warning("HVDLITE_AUTOTUNE_LOG=%s: %s; tuning goes on without it.", self._path, error)
