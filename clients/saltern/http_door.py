"""A small HTTP server for what scrapers and probes ask a server of ours: ``/metrics``, ``/livez``, ``/readyz``.

It answers one GET or HEAD for each connection and closes it. Whoever calls is nobody: a request line, its headers, the
time for them, the time to take an answer and the number of connections are bounded, and answers leave in pieces, so
that a caller who does not read holds little.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

#: Request line and headers together.
HEAD_MAX_BYTES: Final = 8 * 1024
HEAD_S: Final = 5.0
ANSWER_S: Final = 30.0
CONNECTIONS_MAX: Final = 32
_LINGER_S: Final = 1.0
_PIECE_BYTES: Final = 64 * 1024
_REQUEST_LINE: Final = re.compile(rb"([A-Z]{1,16}) (/[!-~]{0,1023}) HTTP/1\.[01]")
_HEADER: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)")


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole HTTP response, but for the headers that every one has."""

    status: HTTPStatus
    body: bytes = b""
    content_type: str = "application/json"
    allow: str = ""

    @classmethod
    def of_json(cls, status: HTTPStatus, content: Mapping[str, object]) -> Answer:
        """``content`` on one line."""
        return cls(status, json.dumps(content).encode() + b"\n")


@dataclass(frozen=True, slots=True)
class _Request:
    path: str
    accept: str
    is_head: bool


#: Makes the answer for the value of an ``Accept`` header.
Page = Callable[[str], Awaitable[Answer]]


class HttpDoor:
    """Serves pages on a listening socket, which it owns.

    Args:
        pages: by path.
        on_failure: called where a page raised, in the handler of its exception; the caller gets a 500.

    Attributes:
        requests: answers so far, by status code.
    """

    def __init__(self, listener: socket.socket, pages: Mapping[str, Page], *, on_failure: Callable[[], None]) -> None:
        self._listener = listener
        self._pages = pages
        self._on_failure = on_failure
        self._server: asyncio.Server | None = None
        #: Who has not sent a whole request yet, the oldest first; and who is being answered.
        self._asking: dict[asyncio.Task[None], None] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self.requests: Final[Counter[int]] = Counter()

    async def open(self) -> None:
        """Begin to accept."""
        self._server = await asyncio.start_server(self._serve, sock=self._listener, limit=HEAD_MAX_BYTES)

    async def close(self) -> None:
        """Stop accepting and end every connection; idempotent."""
        if self._server is not None:
            self._server.close()
        self._listener.close()
        tasks = [*self._asking, *self._answering]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._asking) + len(self._answering) >= CONNECTIONS_MAX:
                if not self._asking:
                    return
                # Whoever means it asks at once and is not the oldest for long.
                oldest = next(iter(self._asking))
                del self._asking[oldest]
                oldest.cancel()
            self._asking[task] = None
            await self._converse(task, reader, writer)
        except asyncio.CancelledError:
            pass  # the task ends here, and nobody waits for its outcome
        except (OSError, TimeoutError):
            pass  # the caller is gone, or too slow
        finally:
            self._asking.pop(task, None)
            self._answering.discard(task)
            writer.transport.abort()

    async def _converse(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            async with asyncio.timeout(HEAD_S):
                request = _parse(await reader.readuntil(b"\r\n\r\n"))
        except asyncio.IncompleteReadError:
            return
        except asyncio.LimitOverrunError:
            request = Answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        except TimeoutError:
            request = Answer(HTTPStatus.REQUEST_TIMEOUT)
        self._asking.pop(task, None)
        self._answering.add(task)
        async with asyncio.timeout(ANSWER_S):
            answer = request if isinstance(request, Answer) else await self._answer(request)
            self.requests[int(answer.status)] += 1
            is_head = isinstance(request, _Request) and request.is_head
            await _send(writer, answer, is_head=is_head)
        # A socket closed with unread bytes is reset, which takes the answer away from its reader.
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(_LINGER_S):
                writer.write_eof()
                while await reader.read(_PIECE_BYTES):
                    pass

    async def _answer(self, request: _Request) -> Answer:
        page = self._pages.get(request.path)
        if page is None:
            return Answer.of_json(HTTPStatus.NOT_FOUND, {"paths": sorted(self._pages)})
        try:
            return await page(request.accept)
        except Exception:
            self._on_failure()
            return Answer.of_json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "see the server's log"})


def _parse(head: bytes) -> _Request | Answer:
    """Read a request's head; an answer if it cannot be served whatever its path."""
    line, *header_lines = head[:-4].split(b"\r\n")
    matched = _REQUEST_LINE.fullmatch(line)
    if matched is None:
        return Answer(HTTPStatus.BAD_REQUEST)
    method, target = matched.groups()
    accept: list[str] = []
    for header_line in header_lines:
        header = _HEADER.fullmatch(header_line)
        if header is None:
            return Answer(HTTPStatus.BAD_REQUEST)
        name, value = header[1].lower(), header[2].strip()
        if name == b"transfer-encoding" or (name == b"content-length" and value != b"0"):
            return Answer(HTTPStatus.BAD_REQUEST)  # a body: nobody asks for one here
        if name == b"accept":
            accept.append(value.decode("latin-1"))
    if method not in {b"GET", b"HEAD"}:
        return Answer(HTTPStatus.METHOD_NOT_ALLOWED, allow="GET, HEAD")
    path = target.decode("ascii").partition("?")[0]
    return _Request(path, ",".join(accept), is_head=method == b"HEAD")


async def _send(writer: asyncio.StreamWriter, answer: Answer, *, is_head: bool) -> None:
    lines = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    ]
    if answer.allow:
        lines.append(f"Allow: {answer.allow}")
    writer.write("\r\n".join((*lines, "", "")).encode("ascii"))
    body = memoryview(b"" if is_head else answer.body)
    for start in range(0, len(body), _PIECE_BYTES):
        await writer.drain()
        writer.write(body[start : start + _PIECE_BYTES])
    await writer.drain()
