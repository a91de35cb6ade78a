"""Credentials of a program that was handed a tenant's short-lived token instead of an API key."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from saltern.credentials import EXCHANGE_TIMEOUT_MS, RenewingCredentials
from saltern.deadline import Deadline
from saltern.errors import FailedPreconditionError, PermissionDeniedError, SalternError, UnauthenticatedError
from saltern.grant import Grant

if TYPE_CHECKING:
    from saltern.tls import ClientTls

CHECK_EVERY_S: Final = 30.0
#: The token itself is no good any more, as opposed to: nobody could be asked.
VERDICTS: Final = (UnauthenticatedError, PermissionDeniedError, FailedPreconditionError)


class TokenCredentials(RenewingCredentials):
    """Asks the control plane what a token is good for, and every ``check_every_s`` whether it still is.

    They end with the token: whoever handed it over hands over the next one, to new credentials. While the control plane
    is away the last answer holds, until the token expires (I9).

    Args:
        control: ``host:port`` of the control plane.
        access_token: of the audience node.
        check_every_s: between two looks, which are made in the background and only while the credentials are used.
        timeout_ms: for each look.
        tls: whom to trust at the other end; None for plain text.

    Raises:
        UnauthenticatedError, PermissionDeniedError, FailedPreconditionError: the token is good for nothing.
        UnavailableError, DeadlineExceededError: the control plane does not answer.
    """

    def __init__(
        self,
        *,
        control: str,
        access_token: str,
        check_every_s: float = CHECK_EVERY_S,
        timeout_ms: int = EXCHANGE_TIMEOUT_MS,
        tls: ClientTls | None = None,
    ) -> None:
        self._check_every_s = check_every_s
        self._verdict: SalternError | None = None

        def exchange(exchange_timeout_ms: int) -> Grant:
            from saltern.exchange import exchange_token  # grpc is heavy: only who exchanges pays for its import

            try:
                return exchange_token(control, access_token, timeout_ms=exchange_timeout_ms, tls=tls).grant
            except VERDICTS as error:
                self._verdict = error.again()
                raise

        super().__init__(exchange, source=f"the control plane at {control}", timeout_ms=timeout_ms)

    def grant(self, deadline: Deadline) -> Grant:
        if self._verdict is not None:
            raise self._verdict.again()  # for good: a token that was refused does not come back
        return super().grant(deadline)

    def reject(self, access_token: str) -> None:
        """A node refused the token: look soon whether it still holds; there is no other one to go on with."""
        self.renew_soon()

    def _is_usable(self, grant: Grant) -> bool:
        if time.time() >= grant.expires_at_s:
            self._verdict = UnauthenticatedError(
                "the token that was handed over has expired", reason="TOKEN_EXPIRED", hint="hand over a new one"
            )
            raise self._verdict.again()
        return super()._is_usable(grant)

    def _accept(self, grant: Grant) -> None:
        super()._accept(grant)
        self._renew_at_s = time.time() + self._check_every_s
