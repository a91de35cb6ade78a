"""The page of every gRPC service, written from ``proto/``: comments there are the documentation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

_INTRODUCTION = """# gRPC services

The control plane serves `saltern.admin.v1` and `saltern.auth.v1`, every node `saltern.cache.v1`; nodes call
`saltern.node.v1`. Send `authorization: Bearer TOKEN` with each call but those of `AuthService`. Errors are in
[errors.md](errors.md). Shapes follow the [API improvement proposals](https://aip.dev): resource names (AIP-122),
standard methods (131 to 135), pages (158), etags (154) and request ids (155).

Written from `proto/` by `make reference`.
"""
_SERVICES, _MESSAGES, _ENUMS, _METHODS, _FIELDS, _VALUES = 6, 4, 5, 2, 2, 2  # field numbers of descriptor.proto
_SCALARS = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}


@dataclass(frozen=True, slots=True)
class _Comments:
    """Leading comments of one file by path of field numbers (descriptor.proto, ``SourceCodeInfo``)."""

    by_path: dict[tuple[int, ...], str]

    def at(self, *path: int) -> str:
        return self.by_path.get(path, "")


def page(root: Path) -> str:
    """The page, in Markdown."""
    buf = Path(sys.executable).parent / "buf"
    image = subprocess.run(
        [buf, "build", root / "proto", "-o", "-#format=binpb", "--as-file-descriptor-set"],
        check=True,
        capture_output=True,
        timeout=60,
    ).stdout
    files = [
        file
        for file in FileDescriptorSet.FromString(image).file
        if file.package.startswith("saltern.") and not file.package.startswith("saltern.kms")
    ]
    files.sort(key=lambda file: (file.package, file.name))
    return _INTRODUCTION + "".join(part for file in files for part in _file(file))


def _file(file: FileDescriptorProto) -> Iterator[str]:
    comments = _Comments(
        {tuple(one.path): " ".join(one.leading_comments.split()) for one in file.source_code_info.location}
    )
    for index, service in enumerate(file.service):
        yield from _service(file.package, service, comments, index)
    for index, message in enumerate(file.message_type):
        yield from _message(message, comments, (_MESSAGES, index))
    for index, enum in enumerate(file.enum_type):
        yield from _enum(enum, comments, (_ENUMS, index))


def _service(package: str, service: ServiceDescriptorProto, comments: _Comments, index: int) -> Iterator[str]:
    yield f"\n## {package}.{service.name}\n\n{_paragraph(comments.at(_SERVICES, index))}"
    yield from _table(
        ("method", "takes", "answers", ""),
        (
            (
                f"`{method.name}`",
                f"{'stream ' if method.client_streaming else ''}{_short(method.input_type)}",
                f"{'stream ' if method.server_streaming else ''}{_short(method.output_type)}",
                comments.at(_SERVICES, index, _METHODS, place),
            )
            for place, method in enumerate(service.method)
        ),
    )


def _message(message: DescriptorProto, comments: _Comments, path: tuple[int, ...]) -> Iterator[str]:
    if not message.field:
        return
    entries = {one.name: one for one in message.nested_type if one.options.map_entry}
    yield f"\n### {message.name}\n\n{_paragraph(comments.at(*path))}"
    yield from _table(
        ("field", "type", ""),
        (
            (f"`{field.name}`", _type(field, entries), comments.at(*path, _FIELDS, place))
            for place, field in enumerate(message.field)
        ),
    )
    for place, nested in enumerate(message.nested_type):
        if nested.name not in entries:
            yield from _message(nested, comments, (*path, 3, place))


def _enum(enum: EnumDescriptorProto, comments: _Comments, path: tuple[int, ...]) -> Iterator[str]:
    yield f"\n### {enum.name}\n\n{_paragraph(comments.at(*path))}"
    yield from _table(
        ("value", ""),
        ((f"`{value.name}`", comments.at(*path, _VALUES, place)) for place, value in enumerate(enum.value)),
    )


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|').replace('<', '&lt;') for cell in row)} |\n"


def _type(field: FieldDescriptorProto, entries: dict[str, DescriptorProto]) -> str:
    name = _short(field.type_name) if field.type_name else _SCALARS[field.type]
    if entry := entries.get(name):
        return f"map of {_type(entry.field[0], {})} to {_type(entry.field[1], {})}"
    return f"repeated {name}" if field.label == FieldDescriptorProto.LABEL_REPEATED else name


def _short(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _paragraph(text: str) -> str:
    return f"{text.replace('<', '&lt;')}\n\n" if text else ""
