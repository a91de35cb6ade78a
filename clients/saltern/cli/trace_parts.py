"""Parts of a composition as options say them: ``NAME=FILE,key=value,...`` and ``NAME,key=value,...``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NoReturn

import msgspec

from saltern.errors import InvalidArgumentError
from saltern.traces.compositions import Part

#: Key of ``--tenant``: where its value goes in a part.
_TENANT_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "format": ("format",),
    "shift": ("shift_s",),
    "scale": ("scale_time",),
    "requests": ("clip", "requests"),
    "think-scale": ("think", "scale"),
    "think-cap": ("think", "cap_s"),
    "shared": ("synthesise", "shared_tokens"),
    "groups": ("synthesise", "groups"),
    "session-every": ("read", "session_every_s"),
    "gap-max": ("read", "gap_max_s"),
    "read-block-tokens": ("read", "block_tokens"),
    "input-tokens": ("read", "input_tokens"),
    "output-tokens": ("read", "output_tokens"),
    "spacing": ("read", "spacing_s"),
    "sort": ("read", "sort"),
}
#: Keys whose value is two, and what stands between them.
_PAIRS: Final[dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]]] = {
    "clip": ("..", ("clip", "start_s"), ("clip", "end_s")),
    "burst": ("/", ("burst", "every_s"), ("burst", "length_s")),
}
_SCAN_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "rate": ("scan", "rate_per_s"),
    "seconds": ("scan", "duration_s"),
    "tokens": ("scan", "input_tokens"),
}


def parse_tenant(text: str) -> tuple[str, Part]:
    """``NAME=FILE,key=value,...`` as (tenant, part).

    Raises:
        InvalidArgumentError: another form, a key that is unknown or twice, or a value of another kind.
    """
    head, *settings = text.split(",")
    name, equals, file = head.partition("=")
    if not equals or not name or not file:
        _refuse(f"--tenant {text!r}", "write NAME=FILE[,KEY=VALUE...]; a name of a file with a comma goes into YAML")
    return name, _part(f"--tenant {name}", {"trace": file}, settings, _TENANT_KEYS)


def parse_scan(text: str) -> tuple[str, Part]:
    """``NAME,rate=R,seconds=S,tokens=N`` as (tenant, part); raises as :func:`parse_tenant`."""
    name, *settings = text.split(",")
    return name, _part(f"--scan {name}", {}, settings, _SCAN_KEYS)


def _part(what: str, fields: dict[str, Any], settings: Iterable[str], known: dict[str, tuple[str, ...]]) -> Part:
    for setting in settings:
        key, equals, value = setting.partition("=")
        if equals and key in _PAIRS and known is _TENANT_KEYS:
            between, first, second = _PAIRS[key]
            low, found, high = value.partition(between)
            if not found:
                _refuse(f"{what} with {setting!r}", f"write {key}=NUMBER{between}NUMBER")
            _put(what, fields, first, low)
            _put(what, fields, second, high)
        elif key in known and (equals or key == "sort"):
            _put(what, fields, known[key], value if equals else "true")
        else:
            _refuse(f"{what} with {setting!r}", f"keys are {', '.join([*known, *_PAIRS])}, each with =VALUE")
    try:
        return msgspec.convert(fields, Part, strict=False)
    except msgspec.ValidationError as error:
        _refuse(f"{what}: {str(error)[:200]}", "see `saltern trace compose --help`")


def _put(what: str, fields: dict[str, Any], path: tuple[str, ...], value: str) -> None:
    for name in path[:-1]:
        fields = fields.setdefault(name, {})
    if path[-1] in fields:
        _refuse(f"{what} with {path[-1]} twice", "say it once")
    if value:  # an open end of a pair keeps its default
        fields[path[-1]] = value


def _refuse(what: str, hint: str) -> NoReturn:
    raise InvalidArgumentError(f"cannot compose {what}", reason="INVALID_COMPOSITION", hint=hint) from None
