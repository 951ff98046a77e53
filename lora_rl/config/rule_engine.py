"""Running the rules, each on the keys whose values can be relied on."""

from __future__ import annotations

from typing import Any

from lora_rl.config.capabilities import CAPABILITIES
from lora_rl.config.errors import Violation
from lora_rl.config.model_files import ModelFacts, ModelFileError, read_model_facts
from lora_rl.config.model_rules import MODEL_RULES
from lora_rl.config.rules import RULES
from lora_rl.config.schema import RunConfig, Section


class _Unusable(Exception):
    """A rule read a key that already has a violation."""


class _View:
    """A section as the rules see it: reading a key without a valid value ends the rule."""

    def __init__(self, section: Section, prefix: str, unusable: frozenset[str]):
        self._section, self._prefix, self._unusable = section, prefix, unusable

    def __getattr__(self, name: str) -> Any:
        kind = type(self._section)
        if name not in kind.model_fields:  # a property: let it read through this view too
            return getattr(kind, name).fget(self)
        path = self._prefix + name
        if path in self._unusable:
            raise _Unusable(path)
        value = getattr(self._section, name)
        return _View(value, f"{path}.", self._unusable) if isinstance(value, Section) else value


def check_rules(config: RunConfig, unusable: frozenset[str] = frozenset()) -> list[Violation]:
    """All violations of capabilities and rules.

    Args:
        config: values that satisfy the schema.
        unusable: keys and sections that already have a violation. A rule that reads one is skipped, so that one
            mistake is not reported twice.
    """
    view: Any = _View(config, "", unusable)
    violations = [v for capability in CAPABILITIES for v in _run(capability.check, view)]
    violations += [v for rule in RULES for v in _run(rule, view)]
    return violations + check_model_rules(config, unusable)


def check_model_rules(config: RunConfig, unusable: frozenset[str] = frozenset()) -> list[Violation]:
    """The violations of rules that need the model's config.json, as far as that is on this machine."""
    view: Any = _View(config, "", unusable)
    try:
        facts: ModelFacts | None = read_model_facts(view.policy.model_name)
    except _Unusable:
        facts = None
    except ModelFileError as error:
        return [Violation("policy.model_name", str(error), view.policy.model_name)]
    return [v for rule in MODEL_RULES for v in _run(rule, view, facts)]


def _run(rule: Any, *arguments: Any) -> list[Violation]:
    violations = []
    try:
        for violation in rule(*arguments):
            violations.append(violation)
    except _Unusable:
        # What it said before stands.
        pass
    return violations
