"""The command line: `python -m hvdlite.bench COMMAND`, under hvdrun, mpirun or srun, or alone with `-np N`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from hvdlite.bench import calibrate, collectives, output, rehearse, scale
from hvdlite.bench.cost import ALGORITHMS
from hvdlite.bench.operations import COLLECTIVES
from hvdlite.bench.replay import FUSION_BYTES
from hvdlite.bench.units import parse_bytes, parse_rate, parse_series
from hvdlite.config import started_by_launcher

T = TypeVar("T")

_EXAMPLES = """\
examples:
  hvdrun -np 2 python -m hvdlite.bench allreduce --vs mpi,gloo --json new.json
  python -m hvdlite.bench allreduce -np 4 --sizes 1K:64M:x4 --dtypes float32,bfloat16 --plot out.png
  python -m hvdlite.bench train -np 2 --network mlp1024,2048,2048,1792,10
  python -m hvdlite.bench train --network conv32,64,64 --record step.json
  python -m hvdlite.bench scale step.json --rates 25,100 --ranks 8:4096:x2 --plot scale.png
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; 2 for what cannot be done, with a line that says why."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        output.check_plot(options.plot)
        if options.check is not None:
            options.check(options)
        if options.ranks_to_start and not started_by_launcher():
            return _start(options.ranks_to_start, arguments)
        options.run(options)
    except (ValueError, OSError) as error:
        print(f"bench {options.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _start(ranks: int, arguments: Sequence[str]) -> int:
    """Start this command on so many ranks of this host, as hvdrun does."""
    from hvdlite.launch.cli import main as hvdrun

    code: int = hvdrun(["-np", str(ranks), "--no-label", sys.executable, "-m", "hvdlite.bench", *arguments])
    return code


def _train(options: argparse.Namespace) -> None:
    try:
        from hvdlite.bench import train
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ValueError("training needs torch: pip install 'hvdlite[torch]'") from error
    train.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hvdlite.bench",
        description="How fast collectives and training are here, and how fast a larger job would be.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_allreduce(commands)
    _add_train(commands)
    _add_calibrate(commands)
    _add_replay(commands)
    _add_scale(commands)
    return parser


def _add_allreduce(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    what = "collectives over sizes, dtypes and backends"
    add = _command(commands, "allreduce", what, collectives.run, collectives.check_options)
    add("--collective", choices=COLLECTIVES, default="allreduce", help="which one (default: allreduce)")
    add("--all", action="store_true", help="all collectives")
    add("--sizes", type=_value(parse_series), default="1K:64M:x4", metavar="LIST",
        help="bytes: a list, or ranges such as 1K:64M:x4 (the default)")  # fmt: skip
    add("--dtypes", type=_words, default="float32", metavar="LIST", help="default: float32")
    add("--backends", type=_words, default="auto", metavar="LIST", help="one after the other (default: auto)")
    add("--vs", type=_words, default="", metavar="mpi,gloo", help="peers that run in the same job, in turn")
    add("--tensors", choices=["numpy", "torch"], default="numpy", help="what hvdlite is given (default: numpy)")
    add("--memory", choices=["private", "shared"], default="private",
        help="shared: buffers in memory that all ranks of the host see")  # fmt: skip
    add("--seconds", type=float, default=0.5, metavar="S", help="about as long each contender runs (default: 0.5)")


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add = _command(commands, "train", "synthetic training against DDP and no communication", _train)
    add("--network", nargs="+", default=["mlp1024,2048,2048,1792,10"], metavar="SIZES",
        help="some: mlp and widths, or conv and channels (default: a perceptron of 10 million parameters)")  # fmt: skip
    add("--batch", type=int, default=32, help="samples per rank (default: 32)")
    add("--threads", type=int, default=1, help="of torch per rank (default: 1)")
    add("--vs", type=_words, default="ddp,none", metavar="ddp,none", help="peers (default: both)")
    add("--repetitions", type=int, default=100, help="steps of each (default: 100)")
    add("--record", metavar="FILE", help="measure one rank's step without communication, for scale and replay")


def _add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add = _command(commands, "calibrate", "latency and bandwidth of this job, as a file for scale", calibrate.run)
    add("--output", metavar="FILE", help="write the TOML file here")


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add = _command(commands, "replay", "run a recorded step with sleep for computation", rehearse.run)
    add("step", help="from train --record")
    add("--bucket", type=_value(parse_bytes), default=0, metavar="SIZE", help="join gradients into buckets")
    add("--repetitions", type=int, default=10, help="steps (default: 10)")


def _add_scale(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add = _command(commands, "scale", "predict a recorded step on many ranks; starts none", scale.run)
    add("step", help="from train --record")
    add("--cluster", metavar="FILE", help="TOML file that describes hosts and links (see docs/design/performance.md)")
    add("--ranks", type=_value(parse_series), default="8:4096:x2", metavar="LIST", help="default: 8:4096:x2")
    add(
        "--rates",
        type=_rates,
        default="25,100",
        metavar="LIST",
        help="links in Gbit/s (default: 25,100); '': as the file says",
    )
    add("--algorithm", choices=ALGORITHMS, default="auto", help="auto: the fastest for each size")
    add("--bucket", type=_value(parse_bytes), default=0, metavar="SIZE", help="join gradients into buckets")
    add("--fusion", type=_value(parse_bytes), default=FUSION_BYTES, metavar="SIZE", help="largest batch (default: 64M)")
    add("--jitter", type=float, metavar="X",
        help="standard deviation of a rank's computing time, as a share of it (default: as recorded)")  # fmt: skip


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    help: str,
    run: Callable[[argparse.Namespace], None],
    check: Callable[[argparse.Namespace], None] | None = None,
) -> Callable[..., argparse.Action]:
    parser = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
    parser.add_argument("-np", dest="ranks_to_start", type=int, metavar="N", help="start N ranks on this host first")
    parser.add_argument("--json", metavar="FILE", help="write the figures, and what they depend on")
    parser.add_argument("--plot", metavar="FILE", help="draw them (needs matplotlib)")
    parser.set_defaults(run=run, check=check)
    return parser.add_argument


def _value(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return `parse` such that argparse shows its message."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


@_value
def _rates(text: str) -> list[float]:
    return [parse_rate(f"{one} Gbit/s") for one in _words(text)]


if __name__ == "__main__":
    sys.exit(main())
