"""What no answer may be, whoever asked and whatever was asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from saltern.rpc_errors import ERROR_DOMAIN, STATUS_DETAILS_KEY

#: Only a fault of ours ends a call so.
FORBIDDEN_CODES = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
#: Of the insides of a server: none of the texts that the fuzz sends holds such a thing.
INSIDES = re.compile(
    rb"Traceback|File \"|\.py\b|site-packages|psycopg|sqlalchemy|SELECT .{0,200}FROM|INSERT INTO|UPDATE .{0,80} SET"
    rb"|violates|DETAIL:|relation \"|/usr/|/root/|/home/|/tmp/|/var/|postgresql://|0x[0-9a-f]{8,}|object at "
)
_REASON = re.compile(r"[A-Z][A-Z0-9_]{1,62}")


def faults_of_error(error: grpc.aio.AioRpcError, *, is_ours: bool = True) -> list[str]:
    """What is wrong with how a call was refused; services that are not ours know nothing of details."""
    code = error.code()
    if code in FORBIDDEN_CODES:
        return [f"{code.name}: {error.details()}"]
    if not is_ours and not error.trailing_metadata():
        return faults_of_bytes(answers_of_error(error))
    found = []
    trailing = dict(error.trailing_metadata() or ())
    packed = trailing.get(STATUS_DETAILS_KEY)
    if not isinstance(packed, bytes):
        return [f"{code.name} without details: {error.details()}"]
    status = status_pb2.Status.FromString(packed)
    info, hint = error_details_pb2.ErrorInfo(), error_details_pb2.LocalizedMessage()
    for detail in status.details:
        for wanted in (info, hint):
            if detail.Is(wanted.DESCRIPTOR):
                detail.Unpack(wanted)
    if info.domain != ERROR_DOMAIN or not _REASON.fullmatch(info.reason):
        found.append(f"no ErrorInfo of ours: {status}")
    if not status.message or "\n" in status.message:
        found.append(f"the message is not one line: {status.message!r}")
    if not hint.message:
        found.append(f"{info.reason} has no hint: {status.message}")
    return found + faults_of_bytes([packed, (error.details() or "").encode()])


def faults_of_bytes(answers: Iterable[bytes]) -> list[str]:
    """Whether the insides of a server show in what it said."""
    found = []
    for answer in answers:
        match = INSIDES.search(answer)
        if match is not None:
            found.append(f"shows its insides: {answer[max(0, match.start() - 60) : match.end() + 60]!r}")
    return found


def leaks(answers: Iterable[bytes], canaries: Sequence[bytes], asked: bytes) -> list[str]:
    """Which of another tenant's ``canaries`` an answer holds that were not in the question."""
    return [
        f"holds another tenant's {canary.decode(errors='replace')!r}"
        for answer in answers
        for canary in canaries
        if canary in answer and canary not in asked
    ]


def parses(parse: Callable[[bytes], object], answer: bytes) -> list[str]:
    """Whether an answer is a message of its method."""
    try:
        parse(answer)
    except DecodeError:
        return ["the answer is no message of its method"]
    return []


def answers_of_error(error: grpc.aio.AioRpcError) -> list[bytes]:
    """Everything that a refusal said."""
    metadata = [*(error.trailing_metadata() or ()), *(error.initial_metadata() or ())]
    return [*texts_of(metadata), (error.details() or "").encode()]


def texts_of(metadata: Any) -> list[bytes]:
    """The values of metadata."""
    return [value if isinstance(value, bytes) else str(value).encode() for _, value in metadata or ()]
