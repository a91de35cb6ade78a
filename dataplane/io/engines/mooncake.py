"""Objects in a Mooncake store, through a process that may hang or die without hurting the node.

::

    ObjectEngine --> MooncakeStore --[names, offsets]--> mooncake_child --> Mooncake's master and storage processes
                          |                                    |
                          +------ shared memory: sealed bytes -+

Whatever the child holds others can write to, at any moment. So nothing is sealed into shared memory and nothing is
opened in it: a record is sealed in private memory and then copied out, and copied in before it is opened. A byte that
changes between two looks at it cannot come into being (I7).

A thread looks after the child: it is started only while somebody listens at the master's address, because Mooncake's
setup waits a minute and a half otherwise, and anew when it has died or was killed for not answering. While there is no
master every call fails at once, so that nobody waits for what cannot come (I10).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import json
import mmap
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import structlog

from dataplane.io.engines import MooncakeSettings
from dataplane.io.engines.objects import OBJECT_MAX_BYTES, Fetched
from saltern.endpoints import Endpoint
from saltern.errors import FailedPreconditionError

_log = structlog.get_logger(__name__)
#: One that is in a put, one that is in a get, and one whose records are copied meanwhile.
CHANNELS: Final = 3
#: Shared memory of one channel: what one call moves at most.
CHANNEL_BYTES: Final = 2 * OBJECT_MAX_BYTES
#: Mooncake's own buffer, which calls with registered memory do not use.
_BUFFER_BYTES: Final = 16 * 1024 * 1024
#: Objects of all nodes begin with this.
_PREFIX: Final = "saltern"
#: A get that has no answer by then means a child that hangs: nobody waits any more (SsdLimits.read_s).
_GET_S: Final = 5.0
_CHANGE_S: Final = 20.0
#: Importing and setting up Mooncake on a busy machine.
_START_S: Final = 15.0
#: How often the master is looked for, and how soon a child is tried again that did not come up.
_PROBE_S: Final = 1.0
_RESTART_S: Final = 5.0
_PROBE_TIMEOUT_S: Final = 2.0
_LENGTH: Final = struct.Struct("<I")
_ANSWER_MAX_BYTES: Final = 1024 * 1024

# Mooncake's codes (mooncake-store/include/types.h).
_NO_SPACE: Final = -200
_NOT_FOUND: Final = -704
_INVALID_PARAMETERS: Final = -600
#: What the child finds of the host's; the rest of the node's environment is nobody's business there.
_ENVIRONMENT: Final = ("PATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR")
_ENVIRONMENT_PREFIXES: Final = ("MC_", "GLOG_")


class _Child:
    """One process with Mooncake's client; raises OSError where it does not come up."""

    def __init__(self, settings: MooncakeSettings) -> None:
        self._memory_fd = os.memfd_create("saltern-mooncake", os.MFD_CLOEXEC)
        self._sockets: list[socket.socket] = []
        theirs: list[socket.socket] = []
        try:
            os.ftruncate(self._memory_fd, CHANNELS * CHANNEL_BYTES)
            memory = memoryview(mmap.mmap(self._memory_fd, CHANNELS * CHANNEL_BYTES))
            self.channels: queue.SimpleQueue[_Channel] = queue.SimpleQueue()
            for number in range(CHANNELS):
                own, other = socket.socketpair()
                self._sockets.append(own)
                theirs.append(other)
                start = number * CHANNEL_BYTES
                self.channels.put(_Channel(self, own, start, memory[start : start + CHANNEL_BYTES]))
            descriptors = [self._memory_fd, *(one.fileno() for one in theirs)]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-m", "dataplane.io.engines.mooncake_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=descriptors,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the node, which then closes this
            )
        except BaseException:
            self._close()
            raise
        finally:
            for one in theirs:
                one.close()
        self._last_words: deque[str] = deque(maxlen=1)
        self._listener = threading.Thread(target=self._listen, name="mooncake-stderr", daemon=True)
        self._listener.start()
        try:
            self._set_up(settings, descriptors)
        except BaseException:
            self.end()
            raise

    def _set_up(self, settings: MooncakeSettings, descriptors: Sequence[int]) -> None:
        assert self._process.stdin is not None
        setup = {
            "master_host": settings.master.host,
            "master_port": settings.master.port,
            "metadata": settings.metadata,
            "protocol": settings.protocol,
            "device": settings.device,
            "buffer_bytes": _BUFFER_BYTES,
            "memory": descriptors[0],
            "memory_bytes": CHANNELS * CHANNEL_BYTES,
            "channels": list(descriptors[1:]),
        }
        self._process.stdin.write(json.dumps(setup).encode() + b"\n")
        self._process.stdin.flush()
        [code] = receive_codes(self._sockets[0], 1, _START_S)
        if code != 0:
            raise OSError(errno.EHOSTUNREACH, f"Mooncake's setup answers {code}")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def last_words(self) -> str:
        """The last line that it wrote."""
        return self._last_words[0] if self._last_words else ""

    def kill(self) -> None:
        """End it at once, whatever it waits for: nobody writes to the shared memory of a call that was given up."""
        self._process.kill()

    def end(self) -> None:
        """Let it go, and see to it that it has gone."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join()
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._close()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._last_words.append(line.decode(errors="replace").strip()[:200])

    def _close(self) -> None:
        os.close(self._memory_fd)
        for one in self._sockets:
            one.close()


class _Channel:
    """A socket and a piece of shared memory, for one call at a time; ``start`` is where that piece begins."""

    def __init__(self, child: _Child, sock: socket.socket, start: int, memory: memoryview) -> None:
        self.start: Final = start
        self.memory: Final = memory
        self._child = child
        self._socket = sock

    def ask(self, operation: str, items: Sequence[object], answers: int, timeout_s: float) -> list[int]:
        """One request; raises OSError: no answer in time, or none that makes sense, and the child is killed."""
        content = json.dumps([operation, items]).encode()
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(_LENGTH.pack(len(content)) + content)
            return receive_codes(self._socket, answers, timeout_s)
        except OSError:
            self._child.kill()
            raise


class MooncakeStore:
    """The :class:`dataplane.io.engines.objects.ObjectStore` in a Mooncake store.

    Args:
        on_return: called from another thread when the store can be reached again, or for the first time.

    Raises:
        FailedPreconditionError: MOONCAKE_NOT_INSTALLED.
    """

    def __init__(self, settings: MooncakeSettings, on_return: Callable[[], None] = lambda: None) -> None:
        if importlib.util.find_spec("mooncake") is None:
            raise FailedPreconditionError(
                "--engine mooncake needs Mooncake's client, which is not installed",
                reason="MOONCAKE_NOT_INSTALLED",
                hint="pip install 'saltern-server[mooncake]', and Debian's libibverbs1 libnuma1 liburing2",
            )
        self._settings = settings
        self._on_return = on_return
        self._child: _Child | None = None
        #: Why there is no child to call; empty while there is.
        self._trouble = "not connected yet"
        #: Mooncake's calls wait in a busy loop: two at a time are slower than one after the other, and cost twice.
        self._in_put, self._in_get = threading.Lock(), threading.Lock()
        self._first_look = threading.Event()
        self._closing = threading.Event()
        self._look_again = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="mooncake", daemon=True)
        self._watcher.start()

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until the store was looked for once; return whether it can be reached."""
        self._first_look.wait(timeout_s)
        return not self._trouble

    def close(self) -> None:
        self._closing.set()
        self._look_again.set()
        self._watcher.join()

    # ---- ObjectStore

    def check(self) -> None:
        if self._trouble:
            raise OSError(errno.EHOSTUNREACH, self._unreachable())

    def put(self, objects: Sequence[tuple[str, memoryview]]) -> None:
        with self._channel() as channel:
            for start, end in _fitting([len(data) for _, data in objects]):
                items = []
                at = 0
                for name, data in objects[start:end]:
                    copy_bytes(channel.memory[at : at + len(data)], data)
                    items.append([_full(name), channel.start + at, len(data)])
                    at += len(data)
                with self._in_put:
                    codes = channel.ask("put", items, len(items), _CHANGE_S)
                if _NO_SPACE in codes:
                    raise OSError(errno.ENOSPC, "Mooncake has no room")
                for code in codes:
                    if code != 0:
                        raise OSError(errno.EIO, f"Mooncake answers {code} to a put")

    def get(self, objects: Sequence[tuple[str, Sequence[memoryview]]]) -> list[Fetched]:
        outcomes: list[Fetched] = []
        sizes = [sum(map(len, views)) for _, views in objects]
        with self._channel() as channel:
            for start, end in _fitting(sizes):
                items: list[tuple[str, int, int]] = []
                at = 0
                for (name, _), size in zip(objects[start:end], sizes[start:end], strict=True):
                    items.append((_full(name), channel.start + at, size))
                    at += size
                with self._in_get:
                    codes = channel.ask("get", items, len(items), _GET_S)
                for (_, offset, size), (_, views), code in zip(items, objects[start:end], codes, strict=True):
                    outcomes.append(_outcome(code, size))
                    if outcomes[-1] is Fetched.WHOLE:
                        _scatter(channel.memory, offset - channel.start, views)
        return outcomes

    def remove(self, names: Sequence[str]) -> None:
        with self._channel() as channel:
            for code in channel.ask("remove", [_full(name) for name in names], len(names), _CHANGE_S):
                if code not in (0, _NOT_FOUND):
                    raise OSError(errno.EIO, f"Mooncake answers {code} to a removal")

    def remove_below(self, folder: str) -> None:
        assert folder.isalnum(), "a pattern is made of it"
        with self._channel() as channel:
            [count] = channel.ask("remove-matching", [f"^{_full(folder)}/"], 1, _CHANGE_S)
            if count < 0:
                raise OSError(errno.EIO, f"Mooncake answers {count} to a removal")

    # ---- inside

    @contextmanager
    def _channel(self) -> Iterator[_Channel]:
        child = self._child
        if child is None or self._trouble:
            raise OSError(errno.EHOSTUNREACH, self._unreachable())
        try:
            channel = child.channels.get(timeout=_CHANGE_S)
        except queue.Empty:
            raise OSError(errno.EBUSY, "every channel to Mooncake is taken") from None
        try:
            yield channel
        finally:
            child.channels.put(channel)
            if not child.is_alive:
                self._look_again.set()

    def _unreachable(self) -> str:
        return f"Mooncake at {self._settings.master}: {self._trouble or 'its client is starting'}"

    def _watch(self) -> None:
        while not self._closing.is_set():
            self._look_again.clear()
            pause_s = self._look()
            self._first_look.set()
            self._look_again.wait(pause_s)
        if self._child is not None:
            self._trouble = "closed"
            self._child.end()
            self._child = None

    def _look(self) -> float:
        """See whether the master is there, and that there is a child while it is; return when to look again."""
        child = self._child
        if child is not None and not child.is_alive:
            self._tell(f"its client has ended: {child.last_words}")
            self._child = None
            child.end()
        if why := _out_of_reach(self._settings.master):
            self._tell(f"not reachable: {why}")
            return _PROBE_S
        if self._child is None:
            try:
                self._child = _Child(self._settings)
            except OSError as error:
                self._tell(f"its client does not start: {error.strerror or error}")
                return _RESTART_S
        self._tell("")
        return _PROBE_S

    def _tell(self, trouble: str) -> None:
        before, self._trouble = self._trouble, trouble
        if trouble == before:
            return
        if trouble:
            _log.warning("mooncake", reason=trouble, endpoint=str(self._settings.master))
        else:
            _log.info("mooncake", endpoint=str(self._settings.master))
            self._on_return()


def receive_codes(sock: socket.socket, count: int, timeout_s: float) -> list[int]:
    """``count`` codes of the child; raises OSError for anything else: whoever reaches it may speak for it."""
    sock.settimeout(timeout_s)
    [length] = _LENGTH.unpack(_receive(sock, _LENGTH.size))
    if length > _ANSWER_MAX_BYTES:
        raise OSError(errno.EPROTO, "Mooncake's client answers with too much")
    try:
        codes = json.loads(_receive(sock, length))
    except (ValueError, RecursionError):
        raise OSError(errno.EPROTO, "Mooncake's client answers with nonsense") from None
    if not isinstance(codes, list) or len(codes) != count or not all(type(code) is int for code in codes):
        raise OSError(errno.EPROTO, "Mooncake's client answers something else")
    return codes


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy outside the GIL, so that event loop and doors go on; both are writable memory of the same length."""
    assert len(target) == len(source)
    ctypes.memmove(_address(target), _address(source), len(source))


def _out_of_reach(master: Endpoint) -> str:
    """Why nobody can be called there; empty if somebody listens."""
    try:
        with socket.create_connection((master.host, master.port), _PROBE_TIMEOUT_S) as probe:
            # On one host a call to a port that nobody listens at may reach itself, if it began at that very port.
            return "" if probe.getsockname() != probe.getpeername() else "nobody listens"
    except OSError as error:
        return str(error.strerror or error)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _scatter(memory: memoryview, offset: int, views: Sequence[memoryview]) -> None:
    for view in views:
        copy_bytes(view, memory[offset : offset + len(view)])
        offset += len(view)


def _outcome(code: int, size_bytes: int) -> Fetched:
    if code == size_bytes:
        return Fetched.WHOLE
    if code == _NOT_FOUND:
        return Fetched.GONE
    # A longer object does not fit the memory that was named for it.
    return Fetched.RESIZED if code >= 0 or code == _INVALID_PARAMETERS else Fetched.FAILED


def _fitting(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut a list into stretches that a channel's memory holds."""
    start, total = 0, 0
    for at, size in enumerate(sizes):
        if total + size > CHANNEL_BYTES and at > start:
            yield start, at
            start, total = at, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)


def _full(name: str) -> str:
    return f"{_PREFIX}/{name}"


def _environment() -> dict[str, str]:
    given = {
        name: value
        for name, value in os.environ.items()
        if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)
    }
    return {"GLOG_minloglevel": "2", **given}


def _receive(sock: socket.socket, length: int) -> bytes:
    content = bytearray()
    while len(content) < length:
        part = sock.recv(length - len(content))
        if not part:
            raise OSError(errno.ECONNRESET, "Mooncake's client has ended")
        content += part
    return bytes(content)
