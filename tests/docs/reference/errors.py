"""The table of every error: which reason, what it says and what to do, read from where the errors are raised."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from saltern import errors
from saltern.errors import SalternError

PACKAGES = ("clients/saltern", "controlplane", "dataplane", "tenants")
KINDS: dict[str, type[SalternError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, SalternError) and kind is not SalternError
}
_REASON = re.compile(r"[A-Z][A-Z0-9_]{3,}")
_INTRODUCTION = """# Errors

Every error of Saltern has a *status* (the numbers of `google.rpc.Code`, the same on gRPC and on the wire protocol),
a *reason* for programs, a message that names what was asked and which limit or rule refused it, and a hint that says
what to do. Branch on the reason: it is stable across releases, the words are not. `{…}` stands for what the error
names; reasons that are raised in several places show the first message for each status.
[sdk.md](../sdk.md#what-happens-when) says which of them a client returns for one block and which it raises;
[cli.md](../cli.md) says the exit codes.

Written from the code by `make reference`.

"""


@dataclass(frozen=True, slots=True)
class Row:
    """One reason as the code raises it."""

    reason: str
    status: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class _Helper:
    """A function of one file that makes errors of one kind; where in its call the parts of an error stand."""

    kind: type[SalternError]
    parameters: tuple[str, ...]
    reason: str | None
    message: ast.expr | None
    hint: ast.expr | None


def page(root: Path) -> str:
    """The page, in Markdown."""
    lines = ["| reason | status | what it says | what to do |", "|---|---|---|---|"]
    lines += [
        f"| `{row.reason}` | {row.status} | {_cell(row.message)} | {_cell(row.hint)} |" for row in sorted_rows(root)
    ]
    return _INTRODUCTION + "\n".join(lines) + "\n"


def sorted_rows(root: Path) -> list[Row]:
    """One row for each reason and status, in the order of reasons; the one with a hint wins."""
    found: dict[tuple[str, str], Row] = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if "_pb2" not in path.name:
                for row in _rows(ast.parse(path.read_text(encoding="utf-8"))):
                    known = found.get((row.reason, row.status))
                    if known is None or (row.hint and not known.hint):
                        found[row.reason, row.status] = row
    return [found[name] for name in sorted(found)]


def _rows(module: ast.Module) -> Iterator[Row]:
    constants = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    helpers = {
        node.name: helper
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef) and (helper := _helper(node)) is not None
    }
    for node in ast.walk(module):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        if kind := KINDS.get(name):
            reason = _resolved(given.get("reason"), constants) or ("" if "reason" in given else kind.default_reason)
            message, hint = (node.args[0] if node.args else None), given.get("hint")
        elif helper := helpers.get(name):
            kind = helper.kind
            given |= dict(zip(helper.parameters, node.args, strict=False))
            reason = _resolved(given.get(helper.reason or ""), constants)
            message = given.get("message") or given.get("why") or helper.message
            hint = given.get("hint") or helper.hint
        else:
            continue
        if _REASON.fullmatch(reason):
            yield Row(reason, kind.code.name, _text(message, constants), _text(hint, constants))


def _helper(function: ast.FunctionDef) -> _Helper | None:
    """What ``function`` is as a maker of errors, if its ``reason`` is an argument."""
    arguments = function.args
    names = tuple(one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS:
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            reason = given.get("reason")
            if isinstance(reason, ast.Name) and reason.id in names:
                positional = names[1:] if names[:1] == ("self",) else names
                message = node.args[0] if node.args else None
                return _Helper(KINDS[node.func.id], positional, reason.id, message, given.get("hint"))
    return None


def _resolved(value: ast.expr | None, constants: dict[str, ast.expr]) -> str:
    if isinstance(value, ast.Name):
        value = constants.get(value.id)
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def _text(value: ast.expr | None, constants: dict[str, ast.expr]) -> str:
    """What a reader sees of an expression: its text, with a name in braces for what is filled in."""
    match value:
        case None:
            return ""
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, constants) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, constants) + _text(right, constants)
        case ast.Name(id=name) if name in constants:
            return _text(constants[name], constants)
        case ast.FormattedValue(value=inner):
            return _text(inner, constants)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return "{" + name.strip("_").lower().replace("_", " ") + "}"
        case ast.Call(func=ast.Name(id="str" | "repr" | "len" | "int"), args=[inner]):
            return _text(inner, constants)
        case _:
            return "{…}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
