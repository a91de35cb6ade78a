"""Cases of a fuzz from a seed: which method, who calls it, and the bytes that are sent."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf.message import Message

from tests.fuzz.encoded import DAMAGES, Damage
from tests.fuzz.services import Method
from tests.fuzz.values import Names, Target, hostile_count, make_hostile, sensible, targets

#: What is sent, in words, and the encoded messages.
Sent = tuple[str, list[bytes]]
Plan = Callable[[Method, Names, random.Random], Sent]


@dataclass(frozen=True)
class Case:
    """One call. ``messages``: encoded; one, but for streams and for calls that are none."""

    number: int
    method: Method
    role: str
    messages: tuple[bytes, ...]
    what: str

    def __str__(self) -> str:
        sent = " ".join(message[:2000].hex() or "(empty)" for message in self.messages)
        return f"case {self.number}: {self.role} calls {self.method.path} with {self.what}: {sent}"


class Cases:
    """Every case of a seed, without end.

    Args:
        names: where each role takes names from; the roles are its keys.
        able: who may do what a method does; others hear that they may not before anything else is looked at.
    """

    def __init__(
        self,
        seed: int,
        methods: Sequence[Method],
        names: Mapping[str, Names],
        able: Callable[[Method], Sequence[str]],
    ) -> None:
        self._seed = seed
        self._methods = methods
        self._names = names
        self._able = able

    @property
    def first_round(self) -> int:
        """So many cases come first: every method by every role."""
        return len(self._methods) * len(self._names)

    def __iter__(self) -> Iterator[Case]:
        numbers = itertools.count()
        for method, role in itertools.product(self._methods, self._names):
            yield self._case(next(numbers), method, role, _fitting)
        rng = random.Random(f"{self._seed} order")
        roles = list(self._names)
        while True:
            plans = list(self._round())
            rng.shuffle(plans)
            for method, plan in plans:
                role = rng.choice(self._able(method)) if rng.random() < 0.6 else rng.choice(roles)
                yield self._case(next(numbers), method, role, plan)

    def _round(self) -> Iterator[tuple[Method, Plan]]:
        """Every value of every field, every damage, every count of messages; and several of them together."""
        for method in self._methods:
            for target in targets(method.request):
                for value in range(hostile_count(target)):
                    yield method, partial(_hostile, target=target, value=value)
            for damage in DAMAGES:
                yield method, partial(_damaged, damage=damage)
            for count in (0, 2, 9):
                yield method, partial(_wrong_count, count=count)
            for _ in range(8):
                yield method, _several
            for _ in range(4):
                yield method, _fitting

    def _case(self, number: int, method: Method, role: str, plan: Plan) -> Case:
        what, messages = plan(method, self._names[role], random.Random(f"{self._seed} {number}"))
        return Case(number, method, role, tuple(messages), what)


def _request(method: Method, names: Names, rng: random.Random) -> Message:
    request: Any = sensible(method.new_request(), method.service, names, rng)
    if method.may_wait and "timeout" in request.DESCRIPTOR.fields_by_name:
        request.timeout.Clear()
        request.timeout.nanos = 1_000_000
    return request


def _fitting(method: Method, names: Names, rng: random.Random) -> Sent:
    return "what fits", [_request(method, names, rng).SerializeToString()]


def _hostile(method: Method, names: Names, rng: random.Random, *, target: Target, value: int) -> Sent:
    request = _request(method, names, rng)
    make_hostile(request, target, value, names, rng)
    return f"value {value} of {'.'.join(target.path)}", [request.SerializeToString()]


def _several(method: Method, names: Names, rng: random.Random) -> Sent:
    request = _request(method, names, rng)
    fields = list(targets(method.request))
    for target in rng.choices(fields, k=3) if fields else ():
        make_hostile(request, target, rng.randrange(hostile_count(target)), names, rng)
    messages = [request.SerializeToString()]
    if method.is_stream_of_requests:
        messages += [_request(method, names, rng).SerializeToString() for _ in range(rng.randint(0, 3))]
    return "several values", messages


def _damaged(method: Method, names: Names, rng: random.Random, *, damage: Damage) -> Sent:
    encoded = _request(method, names, rng).SerializeToString()
    return f"damage {damage.__name__.lstrip('_')}", [damage(encoded, rng)]


def _wrong_count(method: Method, names: Names, rng: random.Random, *, count: int) -> Sent:
    return f"{count} messages", [_request(method, names, rng).SerializeToString() for _ in range(count)]
