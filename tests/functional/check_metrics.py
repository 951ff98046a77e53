"""Checks what a run recorded.

    python tests/functional/check_metrics.py run/metrics.jsonl \
        "mean(train/reward, 5, 20) > 0.4" "max(val/accuracy) >= first(val/accuracy) + 0.1" "count(train/reward) == 20"

A check compares numbers: literals, + - * / of them, and functions of a metric over a range of steps:
mean, median, min, max, first, last, and count (of finite values). `f(metric)` takes all steps, `f(metric, a)`
those from step a, `f(metric, a, b)` from a to b inclusive. A negative bound counts from the last step of the run:
-1 is the last, so `mean(train/reward, -5, -1)` is over the last five. `count(metric < 1)` counts the values that are
below 1, and so for the other comparisons with a number. Names that are no Python identifiers between
their slashes are quoted: `last("val/math-500/accuracy")`. A value that was not finite makes mean, median, min and
max NaN (first and last when it is theirs), and no comparison with NaN passes.

Prints one line per check. Exit status: 0 all passed, 1 one failed or names a metric that is not there, 2 a check
or a file that cannot be read.
"""

import argparse
import ast
import difflib
import math
import operator
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

from lora_rl.track.recorder import read_metrics, series

ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
COMPARISONS = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
FUNCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
}


class BadCheck(ValueError):
    """The check itself is wrong."""


class Missing(ValueError):
    """The check is well formed, but the run recorded nothing that it could look at."""


class Check:
    """One comparison, evaluated over the records of a run.

    Attributes:
        measured: each function call of the check as written, with its value.
    """

    def __init__(self, text: str, records: Sequence[Mapping]):
        self.text = text
        self.records = records
        self.measured: dict[str, float] = {}

    def passes(self) -> bool:
        """Raises BadCheck or Missing."""
        try:
            tree = ast.parse(self.text.strip(), mode="eval").body
        except SyntaxError as error:
            raise BadCheck(f"not an expression: {error.msg}") from error
        if not isinstance(tree, ast.Compare):
            raise BadCheck("a check is a comparison, such as mean(train/reward) > 0.4")
        sides = [self._number(side) for side in (tree.left, *tree.comparators)]
        results = []
        for left, comparison, right in zip(sides, tree.ops, sides[1:], strict=False):
            if type(comparison) not in COMPARISONS:
                raise BadCheck("compare with < <= > >= == !=")
            both = not (math.isnan(left) or math.isnan(right))  # NaN != 1 is true in Python
            results.append(both and COMPARISONS[type(comparison)](left, right))
        return all(results)

    def _number(self, node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
                try:
                    return ARITHMETIC[type(op)](self._number(left), self._number(right))
                except ZeroDivisionError:
                    return math.nan
            case ast.Call(func=ast.Name(id=name), args=[metric, *bounds], keywords=[]) if len(bounds) <= 2:
                accepts: Callable[[float], bool] = math.isfinite
                if name == "count" and isinstance(metric, ast.Compare):
                    metric, accepts = metric.left, self._condition(metric)
                value = self._call(name, _metric_name(metric), [_step(bound) for bound in bounds], accepts)
                self.measured[ast.unparse(node).replace(" / ", "/")] = value
                return value
        raise BadCheck(f"{ast.unparse(node)!r} is neither a number nor function(metric, first step, last step)")

    def _condition(self, node: ast.Compare) -> Callable[[float], bool]:
        """What `metric < 1` asks of a value."""
        if len(node.ops) > 1 or type(node.ops[0]) not in COMPARISONS:
            raise BadCheck(f"{ast.unparse(node)!r}: compare the metric once, with < <= > >= == !=")
        compare, bound = COMPARISONS[type(node.ops[0])], self._number(node.comparators[0])
        return lambda value: math.isfinite(value) and compare(value, bound)

    def _call(self, function: str, metric: str, bounds: Sequence[int], counts: Callable[[float], bool]) -> float:
        if function != "count" and function not in FUNCTIONS:
            raise BadCheck(f"function {function!r}; {_nearest(function, [*FUNCTIONS, 'count'])}")
        steps, values = series(self.records, metric)
        if not steps:
            known = sorted({name for record in self.records for name in record if "/" in name})
            raise Missing(f"no metric {metric!r} in the file; {_nearest(metric, known)}")
        end = self.records[-1]["step"]
        first, last = (b if b >= 0 else end + 1 + b for b in (*bounds, *(0, -1)[len(bounds) :]))
        chosen = [value for step, value in zip(steps, values, strict=True) if first <= step <= last]
        if function == "count":
            return sum(map(counts, chosen))
        if not chosen:
            raise Missing(f"{metric!r} has no value in steps {first} to {last}; it has {steps[0]} to {steps[-1]}")
        if function not in ("first", "last") and not all(map(math.isfinite, chosen)):
            return math.nan
        return FUNCTIONS[function](chosen)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", help="path of a metrics.jsonl")
    parser.add_argument("checks", nargs="+", metavar="check", help='such as "last(train/loss) < 1"')
    options = parser.parse_args(arguments)
    try:
        records = read_metrics(options.metrics)
    except (OSError, ValueError) as error:
        print(f"ERROR  {error}", file=sys.stderr)
        return 2

    status = 0
    for text in options.checks:
        check = Check(text, records)
        try:
            passed = check.passes()
        except Missing as error:
            print(f"FAIL   {text}: {error}")
            status = max(status, 1)
        except BadCheck as error:
            print(f"ERROR  {text}: {error}")
            status = 2
        else:
            measured = ", ".join(f"{call} = {value:.6g}" for call, value in check.measured.items())
            print(f"{'PASS' if passed else 'FAIL'}   {text}   [{measured}]")
            status = max(status, 0 if passed else 1)
    return status


def _metric_name(node: ast.expr) -> str:
    """`train/reward` was parsed as a division of names."""
    match node:
        case ast.Constant(value=str() as name):
            return name
        case ast.Name(id=name):
            return name
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return f"{_metric_name(left)}/{_metric_name(right)}"
    raise BadCheck(f"{ast.unparse(node)!r} is no metric name; put an unusual name in quotes")


def _step(node: ast.expr) -> int:
    try:
        step = ast.literal_eval(node)
    except ValueError:
        step = None
    if type(step) is not int:
        raise BadCheck(f"{ast.unparse(node)!r} is no step; a step is a whole number")
    return step


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return f"nearest: {', '.join(close)}" if close else f"there are: {', '.join(known)}"


if __name__ == "__main__":
    sys.exit(main())
