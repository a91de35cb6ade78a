"""What is broken on purpose, and which test has to notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Edit:
    """In the file at ``path`` the text ``old``, which is there once, becomes ``new``."""

    path: str
    old: str
    new: str

    def occurrences(self, root: Path) -> int:
        """How often ``old`` is in the file."""
        return (root / self.path).read_text().count(self.old)

    def applied(self, content: str) -> str:
        """``content`` of the file with the edit made."""
        return content.replace(self.old, self.new)


@dataclass(frozen=True)
class Mutation:
    """One answer to a threat taken away; where a second wall stands behind the first, both.

    Attributes:
        threat: how the line of SECURITY.md begins.
        edits: made together.
        tests: each has to fail then.
        in_rdma_guest: they run in the guest with Soft-RoCE alone.
    """

    threat: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    in_rdma_guest: bool = False
