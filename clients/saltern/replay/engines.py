"""The seam between a replay and what runs it: an engine takes one trace and one setup and yields column by column.

The simulated engine is the node's own core, so it comes with the server distribution, through an entry point; the
client never imports it. The measured one (:mod:`saltern.replay.measured`) is a client of real nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from importlib.metadata import entry_points
from typing import Final, Protocol, cast

from saltern.errors import FailedPreconditionError
from saltern.replay.results import Column, ColumnResult, EngineKind
from saltern.replay.setup import ReplaySetup
from saltern.traces.request import Trace

#: Entry points by names of :class:`EngineKind`: callables without arguments that make an engine.
ENTRY_POINT_GROUP: Final = "saltern.replay"
#: Of one column: requests served so far.
Progress = Callable[[Column, int], None]


class ReplayEngine(Protocol):
    """Runs traffic."""

    @property
    def kind(self) -> EngineKind: ...

    def assumptions(self, setup: ReplaySetup) -> Sequence[tuple[str, str, str]]:
        """What this engine models and how: (name, value, source) of each."""

    def replay(
        self, trace: Trace, setup: ReplaySetup, columns: Sequence[Column], progress: Progress
    ) -> Generator[ColumnResult, None, None]:
        """Yield the result of each column, in order; rates that compare columns are left to the caller.

        Where serving ends early (a damaged trace, Ctrl-C), what the column has so far is yielded with ``complete``
        False, and the next step of the iterator raises why.
        """


def find_engine(kind: EngineKind) -> ReplayEngine:
    """Make the engine of this kind, one that is found by an entry point.

    Raises:
        FailedPreconditionError: SERVER_NOT_INSTALLED: it comes with saltern-server, which is not here.
    """
    found = [entry for entry in entry_points(group=ENTRY_POINT_GROUP) if entry.name == str(kind)]
    if not found:
        raise FailedPreconditionError(
            f"the {kind} replay runs the server's own code, and saltern-server is not installed here",
            reason="SERVER_NOT_INSTALLED",
            hint="pip install saltern-server into this environment",
        )
    return cast("ReplayEngine", found[0].load()())
