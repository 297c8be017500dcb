"""What the ranks run again and again, so that they need not ask each time. Pure.

The coordinator watches what completes. Once the same set of tensors has completed a few times in a row, that is
a *step*, and it becomes a schedule: the step cut into batches, which every rank runs in this order, over
and over, each batch as soon as every rank has submitted all of it. `docs/decisions/0011-learned-schedule.md`
has the protocol and why it is right.

Two sorts of steps are found. One with named tensors is over when one of them comes again; the order within
it may differ from step to step. Operations without names are told apart by what they are, so a
program that has no names at all must repeat itself in the same order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hvdlite.messages import Kind, Request, Response, nameless

WINDOWS = 3  # equal steps in a row before a schedule begins
BATCH_BYTES = 2**22  # what a batch may hold besides its last tensor's group: outlasts its overhead of 0.2 ms
LAST_BYTES = 2**18  # of the last batch of a step: nothing is left to hide it behind
_LONGEST_PERIOD = 16  # operations without names
_LONGEST_STEP = 8192  # operations; what is longer is no step
_MOST_KNOWN = 16  # steps remembered, with what was learned of them
_MOST_STRIKES = 10
_SHORTEST_PATIENCE, _LONGEST_PATIENCE = 0.1, 30.0  # seconds
_STEPS_OF_PATIENCE = 4


class Step(NamedTuple):
    """One operation of a step.

    Attributes:
        slot: what a Schedule says of it: its cached id, or the Response without its name.
        kind, nbytes, group: of its tensor.
        requests: by set rank.
        number: of an operation without a name; -1 of others.
    """

    slot: int | Response
    kind: Kind
    nbytes: int
    group: str
    requests: Mapping[int, Request]
    number: int = -1


@dataclass(slots=True)
class _Known:
    """A step that has been learned: how often it disappointed, and where its batches must end."""

    strikes: int = 0
    cuts: set[Hashable] = field(default_factory=set)


@dataclass(slots=True)
class Learned:
    """A step that may run as a schedule.

    Attributes:
        batches: its operations, in order.
        keys: what identifies each operation within the step, in order.
        patience: seconds, see `messages.Schedule`.
    """

    batches: list[list[Step]]
    keys: list[Hashable]
    patience: float
    known: _Known


class Learner:
    """Watches what completes, one set of ranks' coordinator's eye.

    Args:
        windows: how many equal steps in a row make a schedule.
    """

    def __init__(self, windows: int = WINDOWS) -> None:
        self._windows = windows
        self._known: dict[frozenset[Hashable], _Known] = {}
        self._waited: set[Hashable] = set()  # after these some rank waited before it went on
        self._before: dict[Hashable, Step] = {}  # the window before, if it has just ended
        self._took = 0.0  # its seconds
        self._lengths: set[int] = set()
        self._repeats = 0
        self.disturb(0.0)

    def note(self, step: Step, waited: bool, now: float) -> None:
        """Take in that `step` has completed; `waited` if some caller waits for it before it goes on."""
        window = self._window
        key: Hashable = step.slot
        if step.number >= 0:
            self._occurrences[step.slot] += 1
            key = (step.slot, self._occurrences[step.slot])
            self._note_nameless(step)
        else:
            self._recent.clear()
            if key in window:
                self._close(now)
                window = self._window
            self._has_names = True
        window[key] = step
        if waited:
            self._waited.add(key)
        if len(window) > (_LONGEST_STEP if self._has_names else 4 * _LONGEST_PERIOD):
            self._forget_window(now)

    def disturb(self, now: float) -> None:
        """Take in that something ran which can be part of no schedule, or that a schedule ended."""
        self._forget_window(now)
        self._recent: deque[Step] = deque(maxlen=_LONGEST_PERIOD)
        self._runs = [0] * (_LONGEST_PERIOD + 1)  # by period: how many operations in a row equal the one a period ago

    def learned(self, now: float) -> Learned | None:
        """Return the step that has ended with the last operation noted, if it has come often enough."""
        steps, repeats = self._repeated()
        if steps:
            return self._learn(steps, _keys_of(steps), repeats, now - self._opened)
        window = self._window
        if not self._has_names:
            return None
        if len(window) in self._lengths:
            repeats = self._repeats if self._before.keys() == window.keys() else 0
            return self._learn(list(window.values()), list(window), repeats, now - self._opened)
        if self._repeats > self._windows and window.keys() < self._before.keys():
            # Windows have begun amid what completes together, so that none is whole when this is asked. A step that
            # ends here is as good: what the one before had after this, and this.
            steps = [step for key, step in self._before.items() if key not in window] + list(window.values())
            return self._learn(steps, _keys_of(steps), self._repeats - 1, self._took)
        return None

    def ended(self, learned: Learned, cycles: int, awaited: Hashable, now: float, blameless: bool = False) -> None:
        """Take in that the schedule of `learned` ended after `cycles` full steps.

        Args:
            awaited: key of the operation that a caller waited for before it submitted the rest of the batch, or None.
            blameless: it ended for a reason of ours, and says nothing of what the ranks do.
        """
        known = learned.known
        if awaited is not None and awaited not in known.cuts:
            known.cuts.add(awaited)
        elif blameless:
            pass
        elif cycles >= 2:
            known.strikes = 0
        else:
            known.strikes = min(known.strikes + 1, _MOST_STRIKES)
        self.disturb(now)

    def _learn(self, steps: list[Step], keys: list[Hashable], repeats: int, took: float) -> Learned | None:
        identity = frozenset(keys)
        known = self._known.get(identity)
        needed = self._windows if known is None else 1 << known.strikes
        if repeats + 1 < needed or not _is_consecutive(steps):
            return None
        if known is None:
            while len(self._known) >= _MOST_KNOWN:
                del self._known[next(iter(self._known))]
            known = self._known[identity] = _Known()
            self._lengths.add(len(identity))
        cuts = known.cuts | {key for key in keys if key in self._waited}
        patience = min(max(_STEPS_OF_PATIENCE * took, _SHORTEST_PATIENCE), _LONGEST_PATIENCE)
        return Learned(cut(steps, [key in cuts for key in keys]), keys, patience, known)

    def _repeated(self) -> tuple[list[Step], int]:
        """Return the shortest period of operations without names that repeats itself, and how often it has."""
        if not self._has_names:
            for period, run in enumerate(self._runs):
                if period and run >= (self._windows - 1) * period:
                    return list(self._recent)[-period:], run // period
        return [], 0

    def _note_nameless(self, step: Step) -> None:
        recent, runs = self._recent, self._runs
        n = len(recent)
        for period in range(1, _LONGEST_PERIOD + 1):
            same = period <= n and recent[n - period].slot == step.slot
            runs[period] = runs[period] + 1 if same else 0
        recent.append(step)

    def _close(self, now: float) -> None:
        window, took = self._window, now - self._opened
        repeats = self._repeats + 1 if window.keys() == self._before.keys() else 1
        self._forget_window(now)
        self._before, self._repeats, self._took = window, repeats, took
        self._lengths.add(len(window))

    def _forget_window(self, now: float) -> None:
        self._window: dict[Hashable, Step] = {}
        self._before = {}
        self._occurrences: Counter[Hashable] = Counter()  # of operations without names
        self._has_names = False
        self._opened = now
        self._repeats = 0  # windows in a row equal to the last one
        self._lengths = {len(keys) for keys in self._known}
        if len(self._waited) > _LONGEST_STEP:
            self._waited.clear()


def _keys_of(steps: Sequence[Step]) -> list[Hashable]:
    """Return what identifies each operation within a step: those without names by how many like them came before."""
    seen: Counter[Hashable] = Counter()
    keys: list[Hashable] = []
    for step in steps:
        seen[step.slot] += step.number >= 0
        keys.append((step.slot, seen[step.slot]) if step.number >= 0 else step.slot)
    return keys


def cut(
    steps: Sequence[Step], ends: Sequence[bool], limit: int = BATCH_BYTES, last: int = LAST_BYTES
) -> list[list[Step]]:
    """Cut a step into batches, in order.

    Args:
        ends: whether a batch must end after this operation: some rank waits for it before it goes on.
        limit: largest batch, bytes; a tensor, or a group, that is larger is a batch of its own.
        last: largest last batch, bytes, if it has more than one operation. The rest goes ahead of it.
    """
    batches: list[list[Step]] = []
    batch: list[Step] = []
    nbytes, must_end = 0, False
    for unit, ends_here in _units(steps, ends):
        size = sum(step.nbytes for step in unit)
        if batch and (must_end or nbytes + size > limit):
            batches.append(batch)
            batch, nbytes = [], 0
        batch, nbytes, must_end = [*batch, *unit], nbytes + size, ends_here
    units = [unit for unit, _ in _units(batch, [False] * len(batch))]
    tail: list[Step] = []
    while units and nbytes > last and sum(s.nbytes for s in [*units[-1], *tail]) <= last:
        tail = [*units.pop(), *tail]
    rest = [step for unit in units for step in unit]
    return [*batches, *(part for part in (rest, tail) if part)]


def _units(steps: Sequence[Step], ends: Sequence[bool]) -> list[tuple[list[Step], bool]]:
    """Return what may not be cut: a group, or a single operation; and whether a batch must end after it."""
    units: list[tuple[list[Step], bool]] = []
    for step, end in zip(steps, ends, strict=True):
        if units and step.group and units[-1][0][-1].group == step.group:
            unit, ended = units[-1]
            units[-1] = ([*unit, step], ended or end)
        else:
            units.append(([step], end))
    return units


def _is_consecutive(steps: Sequence[Step]) -> bool:
    """Whether the numbers of operations without names leave nothing out: else some of them are not in the step."""
    last: dict[Kind, int] = {}
    for step in steps:
        if step.number >= 0:
            if last.get(step.kind, step.number - 1) != step.number - 1:
                return False
            last[step.kind] = step.number
    return True


class Numbering:
    """Which number, and so which name, an operation without a name has in each cycle of a schedule.

    Args:
        kinds: of the operations without names, in the order of the schedule.
        starts: by kind, the number of the first of them.
    """

    def __init__(self, kinds: Sequence[Kind], starts: Mapping[str, int]) -> None:
        self.periods = Counter(kinds)
        self.starts = {kind: starts[kind.value] for kind in self.periods}

    def name(self, kind: Kind, place: int, cycle: int) -> str:
        """Return the name of the `place`-th operation of its kind in a step."""
        return nameless(kind, self.starts[kind] + cycle * self.periods[kind] + place)

    def place(self, kind: Kind, number: int) -> tuple[int, int] | None:
        """Return (cycle, place) of an operation by its number, or None if it is none of these."""
        period = self.periods.get(kind, 0)
        since = number - self.starts[kind] if period else -1
        return divmod(since, period) if since >= 0 else None
