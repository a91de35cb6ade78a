"""One line of the report: ours, the machine's limits and the peers, measured in turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from saltern.bench.cpu import CpuUse
from saltern.bench.peers.process import PeerError

OURS = "ours"


class Role(StrEnum):
    OURS = "ours"
    LIMIT = "limit"  #: the machine itself
    PEER = "peer"  #: another store


@dataclass(slots=True)
class Contender:
    """What is measured beside others.

    Attributes:
        measure: measures once and returns a figure.
        cpu: what it took of CPUs; None where that is not counted.
        seen: a figure for each turn.
        failure: why a peer is out; it is not measured again.
    """

    name: str
    role: Role
    measure: Callable[[], float]
    cpu: CpuUse | None = None
    seen: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def figure(self) -> float:
        return median(self.seen)

    def turn(self) -> None:
        if self.failure:
            return
        try:
            self.seen.append(self.measure())
        except PeerError as error:
            self.failure = error.message

    def forget(self) -> None:
        """Drop what was seen while warming up."""
        self.seen.clear()
        if self.cpu is not None:
            self.cpu.reset()


@dataclass(slots=True)
class Case:
    """Contenders that do the same thing.

    Attributes:
        unit: of their figures; for ``us`` less is better.
        contenders: ours first.
    """

    name: str
    unit: str
    contenders: list[Contender]

    def turn(self, number: int) -> None:
        """Measure each once, right after each other, so that they meet the machine in the same mood; a different one
        begins each time."""
        first = number % len(self.contenders)
        for contender in self.contenders[first:] + self.contenders[:first]:
            contender.turn()

    def warm_up(self) -> None:
        self.turn(0)
        for contender in self.contenders:
            contender.forget()

    @property
    def ours(self) -> Contender:
        return self.contenders[0]

    def of(self, role: Role) -> list[Contender]:
        """Contenders of a role that have figures."""
        return [contender for contender in self.contenders if contender.role is role and contender.seen]

    def find(self, name: str) -> Contender | None:
        """The contender of that name, if it has figures."""
        return next((contender for contender in self.contenders if contender.name == name and contender.seen), None)

    def ratio(self, other: Contender) -> float:
        """How much better ours is than another (above 1: better): the median over turns of the ratio in a turn."""
        pairs = list(zip(self.ours.seen, other.seen, strict=False))  # a peer that failed later has fewer turns
        return median(theirs / ours if self.unit == "us" else ours / theirs for ours, theirs in pairs)
