"""`hvdrun doctor` and `hvdrun --check-build`: is everything here that jobs need, and does a small one run?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import findings, probes

NOT_READY = 1  # exit code when something that is needed is missing, or the self-test fails
_TEST_LIMIT = 90.0  # seconds for the self-test, which takes 2

_EXAMPLES = """\
Exit code: 0 when jobs can run, 1 when something that they need is missing or the self-test fails.

examples:
  hvdrun doctor
  hvdrun doctor --json > report.json
"""


def main(argv: Sequence[str]) -> int:
    """Look, test and report; return the exit code."""
    options = _parser().parse_args(argv)
    facts = probes.look(min(options.time_limit, probes.LIMIT))
    if options.check_build:
        print(findings.check_build(facts), end="")
        return 0  # as horovodrun: whoever asks reads the lines
    test = probes.self_test(options.ranks, options.time_limit) if findings.can_start(facts) else None
    found = findings.findings_of(facts, test)
    print(findings.as_json(facts, found, test) if options.json else findings.as_text(facts, found), end="")
    return NOT_READY if any(one.state == findings.PROBLEM for one in found) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hvdrun doctor",
        description="Say what is installed, what is missing and how to get it; then run a small job on this host.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--check-build", action="store_true", help="print only what is installed, as horovodrun --check-build does")
    add("--json", action="store_true", help="print the report as JSON")
    add(
        "-np",
        "--num-proc",
        dest="ranks",
        type=_count,
        default=2,
        metavar="N",
        help="ranks of the self-test (default: 2)",
    )
    add(
        "--time-limit",
        type=_seconds,
        default=_TEST_LIMIT,
        metavar="S",
        help="seconds for each step (default: %(default)g)",
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks (a whole number, 1 or more)")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds
