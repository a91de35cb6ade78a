"""YAML as a tree of text with places: no types are guessed, and nothing can grow past its file.

The events of PyYAML's parser are read, not its objects. So every scalar is the text that somebody wrote (``no`` is a
name like any other), every part knows its line, and what YAML has beyond lists and mappings is refused: anchors and
aliases (with which a few lines become gigabytes), tags (which name types), merge keys, a key twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from saltern.errors import FailedPreconditionError, InvalidArgumentError

FILE_MAX_BYTES: Final = 16 * 1024 * 1024
NODES_MAX: Final = 1_000_000
DEPTH_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a file, counted from 1."""

    source: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Scalar:
    text: str
    quoted: bool
    mark: Mark


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[Node, ...]
    mark: Mark


@dataclass(frozen=True, slots=True)
class Entry:
    """A key with its place, and what it stands for."""

    mark: Mark
    value: Node


@dataclass(frozen=True, slots=True)
class Mapping:
    entries: dict[str, Entry]
    mark: Mark


Node: TypeAlias = Scalar | Sequence | Mapping


class YamlError(InvalidArgumentError):
    """A file that is no YAML, or YAML that is refused; ``mark`` says where."""

    default_reason = "INVALID_YAML"

    def __init__(self, mark: Mark, message: str, hint: str = "") -> None:
        super().__init__(f"{mark}: {message}", hint=hint)
        self.mark = mark


def parse_documents(content: bytes, source: str) -> list[Node]:
    """The documents of one file; empty ones are left out.

    Args:
        source: what the file is called in errors.

    Raises:
        YamlError: as above, or above one of the limits. FailedPreconditionError: PyYAML is not installed.
    """
    start = Mark(source, 1, 1)
    if len(content) > FILE_MAX_BYTES:
        raise YamlError(start, f"the file is larger than {FILE_MAX_BYTES} bytes", "split it into several files")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise YamlError(Mark(source, line, 1), "the file is not UTF-8", "save it as UTF-8") from None
    try:
        import yaml
    except ImportError:
        raise FailedPreconditionError(
            "reading YAML needs PyYAML, which is not installed here",
            reason="YAML_NOT_INSTALLED",
            hint="pip install 'saltern[apply]' into this environment",
        ) from None
    # The parser in C where the wheel has it: a file of 10,000 tenants is read in seconds instead of a minute.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return list(_Builder(source, iter(yaml.parse(text, Loader=loader))).documents())
    except yaml.MarkedYAMLError as error:
        place = error.problem_mark or error.context_mark
        mark = Mark(source, place.line + 1, place.column + 1) if place else start
        raise YamlError(
            mark, f"this is no YAML: {error.problem or error.context}", "check indentation and quotes"
        ) from None
    except yaml.YAMLError as error:
        position = getattr(error, "position", None)
        line = text.count("\n", 0, position) + 1 if isinstance(position, int) else 1
        reason = str(getattr(error, "reason", "") or error).splitlines()[0]
        raise YamlError(Mark(source, line, 1), f"this is no YAML: {reason}") from None


class _Builder:
    """Makes trees of events. The depth is bounded, and so is the recursion."""

    def __init__(self, source: str, events: Iterator[Any]) -> None:
        self._source = source
        self._events = events
        self._nodes = 0

    def documents(self) -> Iterator[Node]:
        import yaml

        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                node = self._node(next(self._events), 0)
                if not (isinstance(node, Scalar) and not node.text and not node.quoted):
                    yield node

    def _node(self, event: Any, depth: int) -> Node:
        import yaml

        mark = self._mark(event)
        self._nodes += 1
        if self._nodes > NODES_MAX:
            raise YamlError(mark, f"the file holds more than {NODES_MAX} values", "split it into several files")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise YamlError(mark, "anchors (&) and aliases (*) are refused", "write the value out where it is needed")
        if getattr(event, "tag", None):
            raise YamlError(
                mark, f"the tag {str(event.tag)[:64]} is refused", "leave it out: types follow from the fields"
            )
        if isinstance(event, yaml.ScalarEvent):
            return Scalar(event.value, bool(event.style), mark)
        if depth >= DEPTH_MAX:
            raise YamlError(mark, f"values are nested deeper than {DEPTH_MAX}", "no field is that deep")
        if isinstance(event, yaml.SequenceStartEvent):
            return Sequence(tuple(self._sequence(depth + 1)), mark)
        return self._mapping(mark, depth + 1)

    def _sequence(self, depth: int) -> Iterator[Node]:
        import yaml

        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            yield self._node(event, depth)

    def _mapping(self, mark: Mark, depth: int) -> Mapping:
        import yaml

        entries: dict[str, Entry] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._node(event, depth)
            if not isinstance(key, Scalar):
                raise YamlError(key.mark, "a key is a list or a mapping", "keys are names of fields")
            if key.text == "<<" and not key.quoted:
                raise YamlError(key.mark, "merge keys (<<) are refused", "write the fields out where they are needed")
            value = self._node(next(self._events), depth)
            if key.text in entries:
                first = entries[key.text].mark
                raise YamlError(key.mark, f"{key.text[:64]!r} is there twice, first in line {first.line}", "keep one")
            entries[key.text] = Entry(key.mark, value)
        return Mapping(entries, mark)

    def _mark(self, event: Any) -> Mark:
        return Mark(self._source, event.start_mark.line + 1, event.start_mark.column + 1)
