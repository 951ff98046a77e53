"""How metrics may be called; part of it comes from configurations."""

import re

_WORD = r"[\w.@+-]+"
METRIC_NAME = re.compile(rf"{_WORD}(/{_WORD})+", re.ASCII)
ALLOWED = "letters, digits and _ . @ + -"


def is_metric_part(name: str) -> bool:
    """Whether `group/<name>` is a metric's name."""
    return METRIC_NAME.fullmatch(f"group/{name}") is not None
