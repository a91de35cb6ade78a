"""The table of every environment variable, read from the commands, the settings and the gateway that take them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from controlplane.settings import ControlSettings
from saltern.cli.reference import walk
from saltern.cli.settings import GlobalOption, global_options

_INTRODUCTION = """# Environment variables

An option on the command line beats the environment. Booleans take `1`, `true`, `0`, `false`; sizes take `512MiB`,
`64GiB` or plain bytes; files that hold secrets must be readable by their owner alone.
The gateway and the connector for vLLM have theirs in [gateway.md](../gateway.md) and [vllm.md](../vllm.md).

Written from the code by `make reference`.

| variable | command | option | what it says |
|---|---|---|---|
"""
_ENTRY = re.compile(r"(?P<names>\w+(?:, \w+)*): ``SALTERN_[^:]*?``: ?(?P<text>.*)", re.DOTALL)


def page(_: Path) -> str:
    """The page, in Markdown."""
    rows = sorted(set(_rows()))
    return _INTRODUCTION + "".join(
        f"| `{variable}` | {command} | {option} | {text} |\n" for variable, command, option, text in rows
    )


def _rows() -> Iterator[tuple[str, str, str, str]]:
    for option in global_options():
        for variable in _variables(option):
            yield variable, "every command", f"`{option.opts[0]}`", _line(option.help or "")
    for words, command, _ in walk():
        for one in command.params:
            if isinstance(one, click.Option) and not isinstance(one, GlobalOption):
                for variable in _variables(one):
                    yield variable, f"`saltern {' '.join(words)}`", f"`{one.opts[0]}`", _line(one.help or "")
    helps = _control_options()
    for name, field in ControlSettings.model_fields.items():
        (variable,) = getattr(field.validation_alias, "choices", [None])
        flag = f"`--{name.replace('_', '-')}`" if name in helps else ""
        yield str(variable), "`saltern serve control`", flag, helps.get(name) or _attribute(name)


def _variables(option: click.Option) -> list[str]:
    given = option.envvar or []
    return [given] if isinstance(given, str) else list(given)


def _control_options() -> dict[str, str]:
    command = next(command for words, command, _ in walk() if words == ("serve", "control"))
    return {one.name: _line(one.help or "") for one in command.params if isinstance(one, click.Option) and one.name}


def _attribute(name: str) -> str:
    """What the docstring of the settings says of a field that no option sets."""
    for entry in re.split(r"\n {8}(?=\w)", ControlSettings.__doc__ or ""):
        if (found := _ENTRY.match(" ".join(entry.split()))) and name in found["names"].split(", "):
            return _line(found["text"])
    return ""


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
