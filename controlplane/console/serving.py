"""The console's listener: uvicorn on the control plane's own event loop, and the socket that it calls services over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from controlplane.auth.vouching import Voucher
from controlplane.clock import Clock
from controlplane.console.app import make_app
from controlplane.console.calls import Services
from controlplane.console.metrics import ConsoleMetrics
from controlplane.console.sessions import Sessions
from controlplane.console.templating import make_environment, read_assets
from controlplane.console.turns import Turns
from controlplane.console.visit import Console
from controlplane.db import Database
from saltern.billing.prices import read_prices
from saltern.endpoints import Endpoint
from saltern.errors import FailedPreconditionError
from saltern.tls_reload import ReloadingTls

#: At a time, and requests with them: a connection has one at a time.
CONNECTIONS_MAX: Final = 256
#: From a connection, or the end of the answer before, to the end of a request's head.
HEAD_S: Final = 10.0
_HEAD_MAX_BYTES: Final = 16 * 1024
_IDLE_S: Final = 30
_BACKLOG: Final = 64
_SHUTDOWN_S: Final = 5
_SOCKET: Final = "services.sock"
#: sockaddr_un of Linux has 108 bytes, the last one 0 (unix(7)).
_SOCKET_PATH_MAX_BYTES: Final = 107

_log = structlog.get_logger(__name__)


@contextlib.contextmanager
def console_socket(state_dir: Path) -> Iterator[str]:
    """A place for the unix socket that the console calls services over, as a target of gRPC.

    In a folder that this user alone may enter, and that goes at the end of the block: in the state directory, where
    what a killed process left is removed by the next one, or among temporary folders where that has too long a name.
    """
    folder = state_dir.absolute() / "console"
    if len(os.fsencode(folder / _SOCKET)) > _SOCKET_PATH_MAX_BYTES:
        folder = Path(tempfile.mkdtemp(prefix="saltern-console-"))
    else:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
    try:
        yield f"unix:{folder / _SOCKET}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def serving_console(
    listen: Endpoint,
    *,
    target: str,
    voucher: Voucher,
    metrics: ConsoleMetrics,
    database: Database,
    clock: Clock,
    prices_file: Path | None,
    tls: ReloadingTls | None,
) -> AsyncIterator[str]:
    """Serve the console for the time of the block; yields its URL.

    Args:
        target: where the services of this process are, see :func:`console_socket`.
        voucher: by which the door believes where a browser is.
        prices_file: see :mod:`saltern.billing.prices`; read once.

    Raises:
        FailedPreconditionError: CANNOT_LISTEN.
        NotFoundError, InvalidArgumentError: the price file cannot be used.
    """
    async with AsyncExitStack() as stack:
        prices = None if prices_file is None else read_prices(prices_file)
        services = Services(target, voucher)
        stack.push_async_callback(services.close)
        assets = read_assets()
        console = Console(services, Sessions(database), make_environment(assets), clock, prices, tls is not None)
        app = make_app(console, assets, is_reachable=not listen.is_loopback)
        listener = _bind(listen)
        stack.callback(listener.close)
        server = _Server(_config(metrics.counted(Turns(app)), tls))
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="console")
        stack.push_async_callback(_stop, server, serving)
        started = asyncio.create_task(server.listening.wait())
        await asyncio.wait({serving, started}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if serving.done():
            serving.result()
        metrics.watch(lambda: not serving.done())
        endpoint = Endpoint(listen.host, listener.getsockname()[1])
        url = f"{'http' if tls is None else 'https'}://{endpoint}/"
        _log.info("console", url=url)
        yield url


class _Server(uvicorn.Server):
    """uvicorn as a part of a process that has its own way to start and to end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening: Final = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's."""
        yield


class _Protocol(H11Protocol):
    """A connection that nobody can hold by saying little: whoever does not ask in time, or comes too many, goes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            transport.abort()
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        is_asking = self.cycle is None or self.cycle.response_complete
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif is_asking and self._head_timer is None and not self.transport.is_closing():
            self._await_head()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _config(app: ASGIApp, tls: ReloadingTls | None) -> uvicorn.Config:
    quiet = logging.getLogger("uvicorn")  # strangers' malformed requests; what fails in a page the page itself logs
    quiet.addHandler(logging.NullHandler())
    quiet.propagate = False
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,  # requests name tenants and filters; what matters of them is in the audit trail
        access_log=False,
        proxy_headers=False,  # nobody's word of another address is believed
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=_SHUTDOWN_S,
        h11_max_incomplete_event_size=_HEAD_MAX_BYTES,
    )
    config.load()
    if tls is not None:
        config.ssl = _reloading_context(tls)
    return config


def _reloading_context(tls: ReloadingTls) -> ssl.SSLContext:
    """A context whose every handshake is done with the certificate as its files say it then."""
    context = tls.context()
    outer = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    outer.minimum_version = context.minimum_version
    # A connection keeps this of the context that it begins with; all else is looked up in the one that it is given.
    outer.verify_mode = context.verify_mode
    outer.num_tickets = 0

    def use_current(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = tls.context()

    outer.sni_callback = use_current  # called without a name too
    return outer


def _bind(listen: Endpoint) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((listen.host, listen.port))
    except OSError as error:
        listener.close()
        raise FailedPreconditionError(
            f"cannot listen on {listen} for the console: {(error.strerror or 'the address is not usable').lower()}",
            reason="CANNOT_LISTEN",
            hint="stop what uses it (`ss -ltnp` shows it), or choose another --console-listen",
        ) from None
    return listener


async def _stop(server: _Server, serving: asyncio.Task[None]) -> None:
    server.should_exit = True
    await asyncio.wait({serving})
