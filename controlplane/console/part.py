"""The console as a part of the control plane's process: nothing of it is there where none is asked for.

What it needs besides is an extra of the distribution, and imported only here.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import grpc

from controlplane.auth.vouching import Voucher
from controlplane.clock import Clock
from controlplane.console.metrics import ConsoleMetrics
from controlplane.db import Database
from controlplane.settings import ControlSettings
from saltern.errors import FailedPreconditionError
from saltern.tls_reload import ReloadingTls


def has_console() -> bool:
    """Whether what the console needs is installed."""
    return all(find_spec(name) is not None for name in ("jinja2", "starlette", "uvicorn"))


class ConsolePart:
    """Binds the console's own way to the services, then serves it.

    Attributes:
        voucher: what the door believes it by.
        metrics: what it tells those who watch the control plane.
    """

    def __init__(self, settings: ControlSettings, database: Database, clock: Clock) -> None:
        self.voucher: Final = Voucher()
        self.metrics: Final = ConsoleMetrics(database, clock)
        self._settings = settings
        self._database = database
        self._clock = clock
        self._target = ""

    def bind(self, server: grpc.aio.Server, stack: AsyncExitStack) -> None:
        """Let ``server``, which does not serve yet, take the console's calls over a socket of this process's own.

        Raises:
            FailedPreconditionError: CONSOLE_NOT_INSTALLED.
        """
        if self._settings.console_listen is None:
            return
        try:
            from controlplane.console.serving import console_socket
        except ImportError as error:
            raise FailedPreconditionError(
                f"the console needs the package {error.name}, which is not installed",
                reason="CONSOLE_NOT_INSTALLED",
                hint="pip install 'saltern-server[console]', or leave --console-listen out",
            ) from None
        self._target = stack.enter_context(console_socket(self._settings.state_dir))
        server.add_insecure_port(self._target)
        # Its folder keeps others out, whatever umask the socket was made under; this says so of the socket itself.
        Path(self._target.removeprefix("unix:")).chmod(0o600)

    async def serve(self, stack: AsyncExitStack, tls: ReloadingTls | None) -> str:
        """Serve until the end of ``stack``; return the URL, empty where there is none.

        Raises:
            FailedPreconditionError: CANNOT_LISTEN.
            NotFoundError, InvalidArgumentError: the price file cannot be used.
        """
        if self._settings.console_listen is None:
            return ""
        from controlplane.console.serving import serving_console

        serving = serving_console(
            self._settings.console_listen,
            target=self._target,
            voucher=self.voucher,
            metrics=self.metrics,
            database=self._database,
            clock=self._clock,
            prices_file=self._settings.console_prices,
            tls=tls,
        )
        return await stack.enter_async_context(serving)
