"""Making the calls of a fuzz, several at a time, and judging how each was answered."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from tests.fuzz import oracle
from tests.fuzz.cases import Case, Cases
from tests.fuzz.services import Method
from tests.fuzz.values import Names

NOBODY = "nobody"
Metadata = tuple[tuple[str, str], ...]
CALLERS = 4
_CALL_TIMEOUT_S = 30.0
#: For what may never come: a policy of nodes that are not there, the end of a policy stream.
_WAIT_TIMEOUT_S = 0.3
_STREAM_READS = 2
#: What the client library makes of a call that was refused before all its messages were sent.
_REFUSED_WHILE_SENDING = "Internal error from Core"


@dataclass
class Outcome:
    """What came of a run.

    Attributes:
        codes: how often a method was answered how, by its path. reached: how often which role called it.
        faults: each with the call that brought it about.
        resident_bytes, descriptors: of the server's process, once a second.
    """

    seed: int
    codes: Counter[tuple[str, str]] = field(default_factory=Counter)
    reached: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    @property
    def calls(self) -> int:
        return self.reached.total()


class CallFuzz(ABC):
    """Calls every method of ``cases`` over one channel.

    Args:
        secrets: what no answer to a role in ``outsiders`` may hold, unless the question did.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        outcome: Outcome,
        cases: Cases,
        names: dict[str, Names],
        *,
        secrets: Sequence[bytes],
        outsiders: Sequence[str],
    ) -> None:
        self._channel = channel
        self.outcome = outcome
        self._cases = cases
        self._names = names
        self._secrets = secrets
        self._outsiders = frozenset(outsiders)

    @abstractmethod
    async def token(self, role: str) -> str:
        """A token of ``role``."""

    @abstractmethod
    def token_refused(self, role: str, token: str) -> None:
        """A token that :meth:`token` gave was refused."""

    def secrets_from(self, method: Method) -> Sequence[bytes]:
        """What ``method`` must tell no outsider that has not asked with it."""
        return self._secrets

    async def run(self, seconds: float) -> Outcome:
        """Every method by every role once, and then whatever comes, until ``seconds`` are over."""
        end_s = time.monotonic() + seconds
        first = self._cases.first_round
        in_time = itertools.takewhile(lambda case: case.number < first or time.monotonic() < end_s, self._cases)
        async with asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(self._call_all(in_time))
        return self.outcome

    async def _call_all(self, cases: Iterator[Case]) -> None:
        for case in cases:
            await self._call(case)

    async def _metadata(self, case: Case) -> Metadata:
        if case.role != NOBODY:
            return (("authorization", f"Bearer {await self.token(case.role)}"),)
        token = await self.token(next(role for role in self._outsiders if role != NOBODY))
        forms: tuple[Metadata, ...] = (
            (),
            (("authorization", ""),),
            (("authorization", "Bearer"),),
            (("authorization", f"Basic {token}"),),
            (("authorization", f"Bearer {token[:-4]}AAAA"),),
            (("authorization", f"Bearer {'.' * 200}"),),
            (("authorization", f"Bearer {token}"), ("authorization", f"Bearer {token}")),
            (("authorization", "Bearer sk-saltern-0123456789abcdef-" + "A" * 43),),
            (("authorization", "Bearer " + "x" * 8000),),
        )
        return random.Random(case.number).choice(forms)

    def _start(self, case: Case, metadata: Metadata) -> Any:
        """The call; one message for a method that takes one goes out as every client sends it."""
        path = case.method.path
        timeout_s = _WAIT_TIMEOUT_S if case.method.may_wait else _CALL_TIMEOUT_S
        if case.method.is_stream_of_requests or len(case.messages) != 1:
            return self._channel.stream_stream(path)(_each(case.messages), metadata=metadata, timeout=timeout_s)
        return self._channel.unary_stream(path)(case.messages[0], metadata=metadata, timeout=timeout_s)

    async def _call(self, case: Case) -> None:
        metadata = await self._metadata(case)
        call = self._start(case, metadata)
        self.outcome.reached[case.method.path, case.role] += 1
        answers: list[bytes] = []
        try:
            async for answer in call:
                answers.append(answer)
                if case.method.is_stream_of_requests and len(answers) >= _STREAM_READS:
                    break
            said = [*answers, *oracle.texts_of(await call.trailing_metadata() if call.done() else ())]
            self._judge(case, "OK", oracle.faults_of_bytes(said), said)
            for answer in answers:
                self._learn(case, answer)
        except grpc.aio.AioRpcError as error:
            self._refused(case, error, metadata)
        finally:
            call.cancel()

    def _refused(self, case: Case, error: grpc.aio.AioRpcError, metadata: Metadata) -> None:
        code, path = error.code(), case.method.path
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and not error.trailing_metadata() and case.method.may_wait:
            self.outcome.codes[path, "waited"] += 1
            return
        is_sent_bit_by_bit = case.method.is_stream_of_requests or len(case.messages) != 1
        if error.details() == _REFUSED_WHILE_SENDING and is_sent_bit_by_bit:
            self.outcome.codes[path, "refused while sending"] += 1
            return
        if code is grpc.StatusCode.UNAUTHENTICATED and case.role != NOBODY:
            self.token_refused(case.role, metadata[0][1].removeprefix("Bearer "))
        faults = oracle.faults_of_error(error, is_ours=case.method.is_ours)
        self._judge(case, code.name, faults, oracle.answers_of_error(error))

    def _judge(self, case: Case, code: str, faults: list[str], said: list[bytes]) -> None:
        self.outcome.codes[case.method.path, code] += 1
        if case.role in self._outsiders:
            faults = faults + oracle.leaks(said, self.secrets_from(case.method), b"".join(case.messages))
        self.outcome.faults += [f"{case}\n    {fault}" for fault in faults]

    def _learn(self, case: Case, answer: bytes) -> None:
        """Keep what can be sent back: to the same method, to another, with a bit changed."""
        faults = oracle.parses(case.method.parse_response, answer)
        if faults:
            self.outcome.faults += [f"{case}\n    {fault}" for fault in faults]
            return
        response = case.method.parse_response(answer)
        names = self._names[case.role]
        for name, seen in (("next_page_token", names.page_tokens), ("etag", names.etags)):
            value = getattr(response, name, "")
            if value:
                seen.append(value)


async def _each(messages: Sequence[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message
