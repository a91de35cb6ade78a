"""Which files ``saltern apply -f`` reads: files, folders and standard input, each once and none too large."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from saltern.apply.resources import Declaration
from saltern.apply.schema import read_declaration
from saltern.apply.yaml_tree import FILE_MAX_BYTES, parse_documents
from saltern.errors import InvalidArgumentError, NotFoundError, PermissionDeniedError

STDIN: Final = "-"
FILES_MAX: Final = 10_000
_SUFFIXES: Final = frozenset({".yaml", ".yml", ".json"})


def load_declaration(sources: Iterable[str]) -> Declaration:
    """What all files say together.

    Raises:
        NotFoundError: a file or folder is not there. PermissionDeniedError: it cannot be read.
        InvalidArgumentError: what is in one is refused, with its place; or there is nothing in any.
    """
    documents = [document for name, content in _contents(list(sources)) for document in parse_documents(content, name)]
    if not documents:
        raise InvalidArgumentError(
            "the files declare nothing", reason="NOTHING_DECLARED", hint="docs/apply.md shows what a file may say"
        )
    return read_declaration(documents)


def _contents(sources: list[str]) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file, one after the other, so that only one is in memory at a time."""
    seen: set[str] = set()
    for source in sources:
        for name in [STDIN] if source == STDIN else _files(Path(source)):
            key = name if name == STDIN else str(Path(name).resolve())
            if key in seen:
                raise InvalidArgumentError(f"{name!r} is given twice", reason="FILE_TWICE", hint="give each file once")
            seen.add(key)
            if len(seen) > FILES_MAX:
                raise InvalidArgumentError(f"more than {FILES_MAX} files are given", hint="apply them in several runs")
            yield ("<stdin>", sys.stdin.buffer.read(FILE_MAX_BYTES + 1)) if name == STDIN else (name, _read(name))


def _files(path: Path) -> list[str]:
    """The file, or those of a folder whose names end in .yaml, .yml or .json, in their order; folders in it are not."""
    if not path.is_dir():
        return [str(path)]
    found = sorted(
        str(one) for one in path.iterdir() if one.suffix in _SUFFIXES and not one.name.startswith(".") and one.is_file()
    )
    if not found:
        raise NotFoundError(
            f"the folder {str(path)!r} holds no .yaml, .yml or .json file",
            reason="FOLDER_EMPTY",
            hint="folders in it are not looked into: name each with -f",
        )
    return found


def _read(name: str) -> bytes:
    try:
        with Path(name).open("rb") as file:
            return file.read(FILE_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(
            f"there is no file {name!r}", reason="FILE_NOT_FOUND", hint="name a file, a folder, or - for standard input"
        ) from None
    except (OSError, ValueError) as error:
        raise PermissionDeniedError(
            f"cannot read {name!r}: {getattr(error, 'strerror', None) or error}", reason="FILE_NOT_READABLE"
        ) from None
