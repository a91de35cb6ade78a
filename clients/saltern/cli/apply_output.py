"""A plan and its outcome, for people and for programs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import click

from saltern.apply.planner import Action, FieldChange, Plan, Step
from saltern.apply.resources import Resource, Value
from saltern.apply.units import format_duration, format_exact_size, format_time
from saltern.cli.failure import one_line
from saltern.cli.settings import Settings

_SIGNS: Final = {Action.CREATE: ("+", "green"), Action.CHANGE: ("~", "yellow"), Action.DELETE: ("-", "red")}
_PAST: Final = {Action.CREATE: "created", Action.CHANGE: "changed", Action.DELETE: "deleted"}
_NOT_DECLARED_SHOWN: Final = 20
#: Ends of field names that the value's own unit says already.
_UNIT: Final = re.compile(r"_period_s$|_time_s$|(?<!block)_bytes$")


def plan_lines(plan: Plan, settings: Settings) -> Iterator[str]:
    """The plan as people read it: a sign for each step, each field before and after, what somebody may lose."""
    color = not settings.no_color and "NO_COLOR" not in os.environ
    for step in plan.steps:
        sign, hue = _SIGNS[step.action]
        head = f"{sign} {step.resource.kind} {step.resource.name}"
        yield click.style(head, fg=hue, bold=True) if color else head
        for change in step.changes:
            yield f"    {_field_text(change, fresh=not step.resource.etag)}"
        if step.warning:
            yield f"    ! {step.warning}"
    for text in plan.waiting:
        yield f"waiting: {one_line(text)}"
    if plan.not_declared:
        names = [resource.name for resource in plan.not_declared[:_NOT_DECLARED_SHOWN]]
        more = len(plan.not_declared) - len(names)
        listed = ", ".join(names) + (f" and {more} more" if more else "")
        yield f"left alone: {listed} ({'is' if len(plan.not_declared) == 1 else 'are'} in no file; --prune deletes)"
    yield summary(plan)


def summary(plan: Plan) -> str:
    if not plan.steps:
        return f"nothing to do: {plan.unchanged} as declared"
    counts = (plan.count(action) for action in (Action.CREATE, Action.CHANGE, Action.DELETE))
    create, change, delete = counts
    return f"{create} to create, {change} to change, {delete} to delete, {plan.unchanged} as declared"


def done_text(step: Step) -> str:
    return f"{_PAST[step.action]} {step.resource.kind} {step.resource.name}"


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as ``--output json`` prints it; bytes, seconds and counts are plain numbers."""
    return {
        "steps": [step_json(step) for step in plan.steps],
        "unchanged": plan.unchanged,
        "notDeclared": [resource.name for resource in plan.not_declared],
        "waiting": list(plan.waiting),
        "conflicts": [
            {
                "kind": str(conflict.resource.kind),
                "name": conflict.resource.name,
                "origin": conflict.resource.origin,
                "message": conflict.message,
                "hint": conflict.hint,
            }
            for conflict in plan.conflicts
        ],
    }


def step_json(step: Step) -> dict[str, Any]:
    return {
        "action": str(step.action),
        "kind": str(step.resource.kind),
        "name": step.resource.name,
        "changes": [
            {"field": _camel(change.field), "before": change.before, "after": change.after} for change in step.changes
        ],
        "warning": step.warning,
        "origin": step.origin,
    }


def outcome_json(plan: Plan, done: Sequence[Step], failed: Step | None, secrets: dict[str, str]) -> dict[str, Any]:
    """What was done of a plan; ``secrets`` only those that are to be shown."""
    left = plan.steps[len(done) + (failed is not None) :]
    outcome: dict[str, Any] = {
        "plan": plan_json(plan),
        "done": [step_json(step) for step in done],
        "failed": None if failed is None else step_json(failed),
        "notDone": [step_json(step) for step in left],
    }
    return {**outcome, "secrets": secrets} if secrets else outcome


def secret_file_name(key: Resource) -> str:
    """``TENANT.KEY.key``: neither part holds a dot, so no two keys share a file."""
    return f"{key.tenant}.{key.name.rpartition('/')[2]}.key"


def _field_text(change: FieldChange, *, fresh: bool) -> str:
    name = _UNIT.sub("", change.field).replace("_", " ")
    after = _value_text(change.field, change.after)
    return f"{name}: {after}" if fresh else f"{name}: {_value_text(change.field, change.before)} -> {after}"


def _value_text(field: str, value: Value) -> str:
    if value is None:
        return "never" if field == "expire_time_s" else "none"
    if isinstance(value, str):
        return f'"{one_line(value)}"' if value == "" or " " in value else one_line(value)
    if field == "expire_time_s":
        return format_time(value)
    if field.endswith("_period_s"):
        return format_duration(value)
    return format_exact_size(value) if "bytes" in field else str(value)


def _camel(field: str) -> str:
    first, *rest = field.split("_")
    return first + "".join(word.capitalize() for word in rest)
