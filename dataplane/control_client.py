"""The node's line to the control plane: register, follow the policy, report usage; survive its absence (I9).

::

    exchange API key -> token ----.
    RegisterNode -> fencing epoch |--> StreamPolicy: apply, then ACK or NACK
          ^                       '--> ReportUsage: every interval, and soon after a policy
          '---- FENCED, or a new process

While the control plane is away the node goes on serving the policy it has; this client tries again with backoff.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Iterator
from contextlib import AbstractAsyncContextManager
from math import inf
from time import monotonic, time
from types import TracebackType
from typing import Final, Protocol, Self
from uuid import uuid4

import grpc
import structlog

from dataplane.collector_pause import collector_paused
from dataplane.control_channel import ControlChannel
from dataplane.core.lease import Lease
from dataplane.core.usage import NodeUsage, PolicyApplied
from dataplane.lease_line import LeaseLine
from dataplane.policy_codec import SnapshotDecoder, decode_delta, encode_usage
from dataplane.policy_file import PolicyFile, Push
from dataplane.registration import Registration
from saltern.admin_client import ApiKey
from saltern.errors import (
    AbortedError,
    DeadlineExceededError,
    SalternError,
    UnauthenticatedError,
    UnavailableError,
)
from saltern.names import TenantId
from saltern.node.v1 import node_pb2
from saltern.rpc_errors import error_from_rpc
from saltern.tls import ClientTls
from tenants.policy import NodePolicy
from tenants.policy_delta import apply_delta
from tenants.tokens import KeySet

_log = structlog.get_logger(__name__)

BACKOFF_FIRST_S: Final = 0.2
BACKOFF_MAX_S: Final = 10.0
#: A connection that lasted this long was a good one: the next attempt starts without patience lost.
SETTLED_S: Final = 30.0
#: The kept policy is marked as current when it was last marked this long ago.
CONFIRM_S: Final = 10.0
#: A stream that has brought nothing for so long, although there is a newer policy, has died silently.
STALLED_S: Final = 30.0
#: Changes within this time go into one report.
REPORT_GATHER_S: Final = 0.1
#: Longest wait for the last report of a node that stops.
LAST_REPORT_S: Final = 2.0


class PolicySink(Protocol):
    """What follows a policy and has books to report: :class:`dataplane.node.Node`."""

    @property
    def applied_version(self) -> int: ...
    @property
    def policy(self) -> NodePolicy: ...
    def apply(
        self, policy: NodePolicy, key_set: KeySet, *, touched: Collection[TenantId] | None = None
    ) -> PolicyApplied: ...
    def usages(self) -> Iterator[NodeUsage]: ...
    @property
    def settled_version(self) -> int: ...
    def renew(self, lease: Lease) -> None: ...


class ControlClient(AbstractAsyncContextManager["ControlClient"]):
    """Keeps one node in touch with its control plane; use it as an async context manager.

    Args:
        endpoint: ``host:port`` of the control plane.
        api_key: of the role node; exchanged for short-lived tokens.
        kept: where every applied policy is kept for a restart (I9); None for nowhere, and then it is served for ever.
        tls: whom to trust at the other end; None for plain text.
    """

    def __init__(
        self,
        endpoint: str,
        api_key: ApiKey,
        registration: Registration,
        node: PolicySink,
        kept: PolicyFile | None = None,
        *,
        tls: ClientTls | None = None,
    ) -> None:
        self._channel = ControlChannel(endpoint, api_key, tls)
        self._registration = registration
        self._node = node
        self._kept = kept
        self._lease = LeaseLine(node)
        self._decoder = SnapshotDecoder()
        self._confirmed_s = 0.0
        self._streamed_s = monotonic()
        #: 0 until registered.
        self._fencing_epoch = 0
        self._report_interval_s = 2.0
        self._report_soon = asyncio.Event()
        # Counters begin at 0 with this process and go on over every registration of it.
        self._counters_id = uuid4().hex
        self._report_sequence = 0
        #: How the line fares, for whoever watches the node.
        self.link = self._channel.link
        #: Set once a policy has been applied.
        self.has_policy = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Raises SalternError: a file of ``tls`` cannot be used."""
        self._channel.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def join(self, patience_s: float) -> None:
        """Authenticate and register for the first time.

        Raises:
            SalternError: at once if the key or the node is refused; UnavailableError after ``patience_s`` without an
                answer.
        """
        deadline_s = monotonic() + patience_s
        while True:
            try:
                await self._register()
                return
            except (UnavailableError, DeadlineExceededError):
                if monotonic() > deadline_s:
                    raise
                await asyncio.sleep(BACKOFF_FIRST_S)

    def resume(self, absence: SalternError) -> None:
        """Serve the policy that was kept, because the control plane cannot be reached; ``run`` goes on looking for it.

        Args:
            absence: why :meth:`join` gave up.

        Raises:
            SalternError: ``absence`` where no policy was kept, or none that this node can serve; the log says why.
        """
        if self._kept is None:
            raise absence
        try:
            kept = self._kept.read(time())
            with collector_paused():
                self._node.apply(*self._decoder.decode(kept.snapshot))
        except SalternError as error:
            _log.warning("no kept policy to serve", reason=error.reason, message=error.message)
            raise absence from None
        in_touch_s = monotonic() - kept.age_s
        self._lease.resumed(kept.snapshot, in_touch_s, -inf if kept.is_ahead else in_touch_s)
        self.link.lost(in_touch_s, absence.reason)
        self.has_policy.set()
        _log.warning(
            "the control plane cannot be reached; serving the kept policy",
            reason=absence.reason,
            policy_version=kept.snapshot.version,
            age_s=round(kept.age_s),
            age_max_s=round(self._kept.age_max_s),
        )

    async def outlast(self) -> None:
        """Wait until the policy may no longer be served (I9): the control plane has been silent for too long.

        Raises:
            UnavailableError: POLICY_TOO_OLD, then.
        """
        if self._kept is None:
            await asyncio.Event().wait()
            return
        while True:
            left_s = self._lease.touch.since_s + self._kept.age_max_s - monotonic()
            if left_s <= 0:
                raise UnavailableError(
                    f"the control plane at {self._channel.endpoint} has not answered for {self._kept.age_max_s:.0f} s,"
                    " as long as its last policy may be served",
                    reason="POLICY_TOO_OLD",
                    hint="bring the control plane back and start the node; --policy-max-age is how long it may be away",
                )
            await asyncio.sleep(left_s)

    async def run(self) -> None:
        """Follow the policy and report usage until cancelled, through every absence of the control plane."""
        backoff_s = BACKOFF_FIRST_S
        while True:
            began_s = monotonic()
            try:
                await self._follow()
            except SalternError as error:
                if isinstance(error, UnauthenticatedError):
                    self._channel.forget_token()
                if isinstance(error, AbortedError):
                    self._fencing_epoch = 0  # another registration came since: register again
                self.link.lost(monotonic(), error.reason)
                if monotonic() - began_s > SETTLED_S:
                    backoff_s = BACKOFF_FIRST_S
                # Jitter, so that the nodes of a cluster do not come back all at once.
                delay_s = backoff_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret hangs on it
                _log.warning(
                    "lost touch with the control plane; serving the last policy",
                    reason=error.reason,
                    message=error.message,
                    policy_version=self._node.applied_version,
                    may_grow=not self._lease.has_run_out,
                    retry_s=round(delay_s, 2),
                )
                await asyncio.sleep(delay_s)
                await self._channel.renew()
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    async def _follow(self) -> None:
        """One connection: raises SalternError when it ends."""
        if not self._fencing_epoch:
            await self._register()
        await self._channel.authenticate()
        streaming = asyncio.create_task(self._stream_policy(), name="policy stream")
        reporting = asyncio.create_task(self._report_usage(), name="usage reports")
        try:
            # Whichever fails first ends both: a report without an answer shows a stream that has died silently.
            await asyncio.wait({streaming, reporting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (streaming, reporting):
                task.cancel()
            outcomes = await asyncio.gather(streaming, reporting, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
                raise outcome

    async def _stream_policy(self) -> None:
        call = self._channel.stream_policy()
        try:
            await call.write(self._answer())
            while isinstance(response := await call.read(), node_pb2.StreamPolicyResponse):
                self._streamed_s = monotonic()
                push = response.delta if response.HasField("delta") else response.snapshot
                error_message = self._apply(push)
                if not error_message:
                    await self._keep(push)
                await call.write(self._answer(error_message))
                # The answer says it all, but for what is left to do, and for a lease that has run out. A report of
                # every node after each change would cost the control plane more than the change.
                if self._lease.has_run_out or self._lease.settled_version < push.version:
                    self._report_soon.set()
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, endpoint=self._channel.endpoint) from None
        except asyncio.InvalidStateError:
            await self._channel.raise_status(call)
        finally:
            call.cancel()
        await self._channel.raise_status(call)

    def _apply(self, push: Push) -> str:
        """Apply what came; return why it could not be, or an empty text. What was in force stays then."""
        try:
            if isinstance(push, node_pb2.PolicyDelta):
                delta, key_set = decode_delta(push)
                self._node.apply(apply_delta(self._node.policy, delta), key_set, touched=delta.touched)
            else:
                self._load(push)
        except SalternError as error:
            self.link.refused(push.version, error.reason)
            _log.error("policy refused", policy_version=push.version, reason=error.reason, message=error.message)
            return str(error)
        self.link.applied()
        self._lease.touch.applied(push.version)
        self.has_policy.set()
        return ""

    def _load(self, snapshot: node_pb2.PolicySnapshot) -> None:
        """Apply a snapshot; raises SalternError. Tenants that are as they were cost next to nothing."""
        began_s = monotonic()
        with collector_paused():
            policy, key_set = self._decoder.decode(snapshot)
            before = self._node.policy.tenants
            touched = [tenant for tenant, rules in policy.tenants.items() if before.get(tenant) is not rules]
            touched += before.keys() - policy.tenants.keys()
            # The first one also says who of those that were found on the disks is no more (I12).
            is_first = not self._node.applied_version
            self._node.apply(policy, key_set, touched=None if is_first else touched)
        _log.info(
            "policy snapshot loaded",
            policy_version=policy.version,
            tenants=len(policy.tenants),
            changed_tenants=len(touched),
            took_s=round(monotonic() - began_s, 4),
        )

    async def _keep(self, push: Push) -> None:
        """Keep what has been applied. A node that cannot write goes on serving: a restart is then less well off.

        What is acknowledged as settled must hold after a restart too (I4): an older policy, with larger shares, must
        not be found then. Where that cannot be ruled out the node does not say that it has settled the new one.
        """
        if self._kept is not None:
            in_touch_unix_s = time() - (monotonic() - self._lease.touch.since_s)
            try:
                await asyncio.to_thread(self._kept.keep, push, in_touch_unix_s)
            except OSError as error:
                _log.warning(
                    "policy not kept for a restart", path=str(self._kept.path), message=error.strerror or str(error)
                )
                if not self._kept.discard():
                    return
        self._lease.kept(push.version)

    def _reported(self, sent_s: float, answer: node_pb2.ReportUsageResponse) -> None:
        """The control plane has taken in a report.

        Raises:
            UnavailableError: POLICY_STREAM_STALLED: there is a newer policy, and nothing has come for too long.
        """
        is_in_touch = self._lease.reported(sent_s, answer)
        # A policy that is still on its way to the disk must not lend its time to the one that is there: a restart would
        # grow by shares that were given away since (I4).
        is_kept = self._lease.acknowledged_version >= answer.policy_version
        if is_in_touch and is_kept and self._kept is not None and sent_s - self._confirmed_s >= CONFIRM_S:
            self._confirmed_s = sent_s
            self._kept.confirm(time() - (monotonic() - sent_s))
        silent_s = min(self._lease.touch.behind_s(monotonic()), monotonic() - self._streamed_s)
        if silent_s > STALLED_S:
            raise UnavailableError(
                f"policy {answer.policy_version} has not come for {silent_s:.0f} s", reason="POLICY_STREAM_STALLED"
            )

    def _answer(self, error_message: str = "") -> node_pb2.StreamPolicyRequest:
        return node_pb2.StreamPolicyRequest(
            node_id=self._registration.node_id,
            fencing_epoch=self._fencing_epoch,
            applied_version=self._lease.acknowledged_version,
            error_message=error_message,
            settled_version=self._lease.settled_version,
            accepts_deltas=True,
        )

    async def report_last(self) -> None:
        """Report once more, when nothing is served any more: what was counted since the last report is billed too.

        Returns in ``LAST_REPORT_S`` at the latest, whether that could be or not: a node that stops is not held up.
        """
        if not self._fencing_epoch:
            return
        try:
            async with asyncio.timeout(LAST_REPORT_S):
                await self._report_once()
        except (SalternError, TimeoutError) as error:
            reason = error.reason if isinstance(error, SalternError) else "DEADLINE_EXCEEDED"
            _log.warning("usage since the last report is not metered", reason=reason)

    async def _report_usage(self) -> None:
        while True:
            self._reported(*await self._report_once())
            try:
                # Not wait_for: Python 3.11's loses a cancellation that comes together with the event, and the node
                # could then not be stopped.
                async with asyncio.timeout(self._report_interval_s):
                    await self._report_soon.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(REPORT_GATHER_S)
            self._report_soon.clear()

    async def _report_once(self) -> tuple[float, node_pb2.ReportUsageResponse]:
        """Report what is there now; return when that was sent, on the monotonic clock, and the answer."""
        await self._channel.authenticate()
        self._report_sequence += 1  # also of one that fails: it may arrive all the same, and late
        report = node_pb2.ReportUsageRequest(
            node_id=self._registration.node_id,
            fencing_epoch=self._fencing_epoch,
            applied_version=self._lease.acknowledged_version,
            settled_version=self._lease.settled_version,
            counters_id=self._counters_id,
            sequence=self._report_sequence,
        )
        for usage in self._node.usages():
            report.tenants.extend(encode_usage(usage))
            await asyncio.sleep(0)  # the books of 10,000 tenants at once would hold up every session
        sent_s = monotonic()
        return sent_s, await self._channel.report_usage(report)

    async def _register(self) -> None:
        sent_s = monotonic()
        response = await self._channel.register(self._registration.request())
        self._fencing_epoch = response.fencing_epoch
        self._lease.registered(sent_s, response)
        self._report_interval_s = max(response.report_interval.ToTimedelta().total_seconds(), REPORT_GATHER_S)
        _log.info("registered", fencing_epoch=response.fencing_epoch)
