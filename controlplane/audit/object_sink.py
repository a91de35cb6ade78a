"""Checkpoints in an object store: one object each, written once, numbered without gaps.

``CHAIN/000000000001.jsonl``, ``CHAIN/000000000002.jsonl``, ... Of two writers one gets the next number and the other
looks again: the store itself lets nobody replace an object. With a retention lock on the bucket not even the owner of
the credentials can. Copied into a folder it is what ``saltern audit verify`` reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from saltern.audit.checkpoints import Checkpoint, decode_checkpoint, encode_checkpoint
from saltern.errors import DataLossError
from saltern.objects import ObjectFolder

_DIGITS: Final = 12
_SUFFIX: Final = ".jsonl"
_NUMBERED: Final = re.compile(rf"/([0-9]{{{_DIGITS}}}){re.escape(_SUFFIX)}$", re.ASCII)
_PROBE: Final = "write-probe"


class ObjectSink:
    """A :class:`controlplane.audit.checkpoint_sinks.CheckpointSink` over an object store.

    Raises what :class:`saltern.objects.ObjectFolder` does where a sink of files raises OSError.
    """

    def __init__(self, folder: ObjectFolder) -> None:
        """Look once whether it can be written.

        Raises:
            FailedPreconditionError, UnavailableError: it cannot.
        """
        self._folder = folder
        self._newest: dict[str, int] = {}
        folder.create(_PROBE, b"")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Others may write at the same time: :meth:`append` finds out."""
        yield

    def last(self, chain: str) -> Checkpoint | None:
        number = self._newest_number(chain)
        if number == 0:
            return None
        content = self._folder.read(_name(chain, number))
        if content is None:
            raise DataLossError(f"the checkpoint {number} of the chain is not there any more")
        return decode_checkpoint(content.rstrip(b"\n"))

    def append(self, checkpoint: Checkpoint) -> bool:
        number = self._newest.get(checkpoint.chain, 0) + 1
        return self._folder.create(_name(checkpoint.chain, number), encode_checkpoint(checkpoint))

    def _newest_number(self, chain: str) -> int:
        """By pages from the last one known, with steps that double: a chain of years has half a million of them."""
        newest, step = self._newest.get(chain, 0), 0
        while True:
            page = self._page(chain, newest + step)
            if page:
                newest = page[-1]
                step = max(1, 2 * step)
            elif step:
                step //= 2
            else:
                break
        self._newest[chain] = newest
        return newest

    def _page(self, chain: str, after: int) -> list[int]:
        names = next(self._folder.names(f"{chain}/", after=_name(chain, after)), [])
        # What else lies there, whoever put it there, is no checkpoint and stops none.
        return [int(match[1]) for match in map(_NUMBERED.search, names) if match]


def _name(chain: str, number: int) -> str:
    return f"{chain}/{number:0{_DIGITS}}{_SUFFIX}"
