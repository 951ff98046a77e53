"""The command `lora-rl`: reports of runs that were made."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lora_rl.track.report import REPORT_NAME, write_comparison, write_report

FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: those of the command line; None: `sys.argv`.

    Returns:
        The process's exit code: 0, or 1 after one line that says what is wrong. Wrong usage exits with 2.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "report" and options.out and len(options.runs) > 1:
        parser.error("report --out takes one RUN: several reports cannot be one file")
    if options.command == "compare" and len(options.runs) < 2:
        parser.error("compare takes two RUNs or more")
    try:
        if options.command == "report":
            written = [write_report(run, options.out) for run in options.runs]
        else:
            written = [write_comparison(options.runs, options.out or _page_name(options.runs))]
    except (OSError, ValueError) as error:
        sys.stderr.write(f"lora-rl {options.command}: {error}\n")
        return FAILED
    sys.stdout.write("".join(f"{path}\n" for path in written))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lora-rl", description="Reports of runs. Training has its scripts: examples/."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    report = commands.add_parser(
        "report",
        help="make the report of a run again, or while it goes on",
        description=f"Write {REPORT_NAME} into each run folder and print where it is.",
    )
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder, such as results/grpo_tiny_cpu")
    compare = commands.add_parser(
        "compare",
        help="two or more runs on one page",
        description="Draw runs together, with what was set differently, and print where the page is.",
    )
    compare.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder; two or more")
    for command, default in ((report, f"RUN/{REPORT_NAME}"), (compare, "compare-RUN-RUN.html here")):
        command.add_argument("-o", "--out", type=Path, metavar="FILE", help=f"the page; {default} unless given")
    return parser


def _page_name(runs: Sequence[Path]) -> Path:
    names = [run.resolve().name for run in runs]
    return Path("compare-" + "-".join(names[:4]) + ".html")
