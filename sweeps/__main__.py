"""Command line: `python -m sweeps COMMAND`. Parses and calls; what a command does stands in its own module."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from sweeps.spec import SpecError

_EXIT_STATUS = """\
exit status of run: 0 every trial of the sweep is in the store; 1 some trials failed, the rest are kept; 2 the input
is wrong and nothing was started; 3 stopped early because the sweep itself is broken; 128+N ended by signal N
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
      The exit status: 0, 1 (not found, or some trials failed), 2 (wrong input: one line on stderr says what), 3, 128+N.
    """
    try:
        args = _parser().parse_args(argv)
        # Imported only now: each command pays for its own libraries, and none for Ray unless it trains.
        module, function = args.command
        return int(getattr(import_module(module), function)(args))
    except SystemExit as stop:  # argparse: --help, or wrong usage
        return int(stop.code or 0)
    except _user_errors() as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def resolve_store(args: argparse.Namespace) -> str:
    """The store that a command means: the one named, else HYLA_STORE, else results/, or results-tiny/ with --tiny."""
    named = getattr(args, "results", None) or os.environ.get("HYLA_STORE")
    return str(named or ("results-tiny" if getattr(args, "tiny", False) else "results"))


def _user_errors() -> tuple[type[Exception], ...]:
    """Errors that a user can cause. The store's are known only once something has imported it."""
    store = sys.modules.get("sweeps.store")
    return (SpecError, *([store.StoreError] if store else []))


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage around it."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m sweeps",
        description="Trains every trial of a sweep file that the results store does not hold yet.",
        epilog=_EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    run = _command(commands, "run", "train what the store does not hold yet", ("sweeps.run", "run_command"))
    _add_sweep_arguments(run)
    run.add_argument(
        "--only", metavar="TRIAL", action="append", default=[], help="train this trial alone (may be given again)"
    )
    run.add_argument(
        "--address", metavar="A", help="the Ray cluster to run on; default: the one around, else this machine"
    )
    run.add_argument("--max-concurrent", metavar="N", type=_positive, help="packs that train at once, at most")
    run.add_argument("--retry", choices=["failed", "diverged", "all"], help="train these trials again")
    run.add_argument("--in-process", action="store_true", help="one pack after another without Ray, for a debugger")
    run.add_argument("--yes", action="store_true", help="start without asking, however much it costs")

    plan = _command(commands, "plan", "what would run, and what it costs", ("sweeps.plan", "plan_command"))
    _add_sweep_arguments(plan)
    plan.add_argument(
        "--devices", metavar="KIND:N", help="price it for these devices, such as h100:8; default: this CPU"
    )

    status = _command(commands, "status", "the state of every sweep in a store", ("sweeps.status", "status_command"))
    _add_store_arguments(status)
    status.add_argument("--watch", action="store_true", help="look again every few seconds until nothing runs")

    show = _command(
        commands, "show", "one trial: config, attempts, error, how to rerun it", ("sweeps.status", "show_command")
    )
    _add_store_arguments(show)
    show.add_argument("trial", metavar="TRIAL", help="its id, or the start of it")

    export = _command(commands, "export", "the store's tables as CSV files", ("sweeps.export", "export_command"))
    _add_store_arguments(export)
    export.add_argument("--out", metavar="DIR", default="export", help="the folder of the files; default: export/")
    export.add_argument("--sweep", metavar="NAME", help="this sweep alone; NAME (tiny) for its tiny form")
    export.add_argument("--raw", action="store_true", help="every attempt, row and request, not only those that count")

    reproduce = _command(
        commands,
        "reproduce",
        "train a trial again from its row alone, and compare",
        ("sweeps.reproduce", "reproduce_command"),
    )
    _add_store_arguments(reproduce)
    reproduce.add_argument("trial", metavar="TRIAL", help="its id, or the start of it")
    reproduce.add_argument(
        "--into", metavar="STORE2", help="keep what is trained in this store; default: it is thrown away"
    )

    compact = _command(
        commands, "compact", "make a few large files of many small ones", ("sweeps.upkeep", "compact_command")
    )
    _add_store_arguments(compact)
    compact.add_argument(
        "--grace",
        metavar="DURATION",
        type=_duration,
        default=600.0,
        help="how long replaced files stay, for others who read them, such as 30s, 10min or 2h; default: 10min",
    )

    repair = _command(
        commands,
        "repair",
        "set aside what is damaged, so that it is trained again",
        ("sweeps.upkeep", "repair_command"),
    )
    _add_store_arguments(repair)
    repair.add_argument("--dry-run", action="store_true", help="only tell what would be done")
    return parser


def _command(commands: "argparse._SubParsersAction[_Parser]", name: str, does: str, target: tuple[str, str]) -> _Parser:
    parser = commands.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.", allow_abbrev=False)
    parser.set_defaults(command=target)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _add_sweep_arguments(parser: _Parser) -> None:
    parser.add_argument("sweep", metavar="SWEEP.yaml", help="the sweep file")
    parser.add_argument("--tiny", action="store_true", help="the same sweep, shrunk to what a CPU trains in minutes")
    parser.add_argument(
        "--results", metavar="STORE", help="default: HYLA_STORE, else results/ (results-tiny/ with --tiny)"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="change a setting, such as model.emb_dim=64 or axes.seed=[0,1] (may be given again)",
    )


def _add_store_arguments(parser: _Parser) -> None:
    parser.add_argument(
        "results", metavar="STORE", nargs="?", help="default: HYLA_STORE, else results/ (results-tiny/ with --tiny)"
    )
    parser.add_argument("--tiny", action="store_true", help="the store of dry runs, where none is named")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _duration(text: str) -> float:
    """Seconds from `30s`, `10min`, `2h` or `1d`; a bare number is seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h|d)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 30s, 10min or 2h")
    return float(match[1]) * {"s": 1, "min": 60, "h": 3600, "d": 86400}[match[2] or "s"]


if __name__ == "__main__":
    sys.exit(main())
