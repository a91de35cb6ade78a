"""Proofs: what must be refused is tried, right now, on the running stack, by hand rather than through the SDK.

Each has a control beside it: the same thing done by who may do it, and that works. A door that refuses everybody proves
nothing.
"""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from saltern.admin.v1.tenants_pb2 import GetTenantRequest
from saltern.admin.v1.tenants_pb2_grpc import TenantServiceStub
from saltern.admin_client import open_channel
from saltern.bare_session import BareSession
from saltern.cache.v1.cache_pb2 import LookupBlocksRequest
from saltern.cache.v1.cache_pb2_grpc import CacheServiceStub
from saltern.client import Client
from saltern.credentials import Grant
from saltern.demo.payload import block_payload, engine_block_hash
from saltern.demo.stack import Stack
from saltern.errors import PermissionDeniedError, ResourceExhaustedError, SalternError, UnauthenticatedError
from saltern.keys import KEY_BYTES, BlockKey
from saltern.results import Refused, Stored
from saltern.rpc_errors import error_from_rpc
from saltern.wire import Get, GetReply, Hello, HelloReply, Lookup, LookupReply, Opcode

_TIMEOUT_MS: Final = 10_000
_PROBE_KEYS_MAX: Final = 1024
_FLOOD_BATCH_BLOCKS: Final = 128


@dataclass(frozen=True, slots=True)
class Proof:
    """One thing that was tried: what, what came of it, and whether that is what must come of it."""

    title: str
    outcome: str
    holds: bool


def foreign_reads(
    owner: Client, stranger: Client, stranger_grant: Grant, wire_endpoint: str, owned_ids: Sequence[int]
) -> tuple[int, Proof]:
    """The stranger reads the owner's blocks: by the owner's own keys, stolen, and by engine hashes under its own salt.

    Args:
        owned_ids: blocks that only the owner has put.

    Returns:
        The hits that the stranger got, and the proof.
    """
    hashes = [engine_block_hash(block_id) for block_id in owned_ids]
    stolen_keys = owner.block_keys(hashes)
    held = [key for key, found in zip(stolen_keys, owner.exists(stolen_keys), strict=True) if found][:_PROBE_KEYS_MAX]
    hits = 0
    with BareSession(wire_endpoint, timeout_ms=_TIMEOUT_MS) as session:
        session.call(Opcode.HELLO, _hello(stranger_grant.access_token, stranger_grant), HelloReply)
        lookup, _ = session.call(Opcode.LOOKUP, Lookup(keys=b"".join(held)), LookupReply)
        hits += sum(lookup.found)
        wanted = Get(keys=b"".join(held), max_sizes=[stranger_grant.block_bytes] * len(held))
        got, payload = session.call(Opcode.GET, wanted, GetReply)
        hits += got.codes.count(0) + (len(payload) > 0)
    hits += sum(stranger.exists(stranger.block_keys(hashes)))
    return hits, Proof(
        f"{stranger.tenant} reads {owner.tenant}'s blocks",
        f"{len(held)} stolen keys and {len(hashes)} engine hashes: {hits} hits ({owner.tenant} itself: {len(held)})",
        hits == 0 and len(held) > 0,
    )


def forged_tokens(stack: Stack, grant: Grant, victim_tenant: str, control_token: str) -> Proof:
    """Tokens that the control plane never signed, at every door: other key, edited tenant, no signature at all."""
    forgeries = {
        "signed by another key": _resign(grant.access_token, {}),
        f"tenant edited to {victim_tenant}": _edit(grant.access_token, {"tenant": victim_tenant}),
        "algorithm none": _without_signature(grant.access_token),
    }
    tried = refused = 0
    for token in forgeries.values():
        for door in (_try_wire, _try_grpc):
            tried += 1
            refused += _refused(UnauthenticatedError, door, stack, token, grant)
    for token in (_resign(control_token, {"role": "platform-admin"}), _without_signature(control_token)):
        tried += 1
        refused += _refused(UnauthenticatedError, _try_control, stack, token, grant)
    genuine = not _refused(SalternError, _try_wire, stack, grant.access_token, grant)
    genuine = genuine and not _refused(SalternError, _try_grpc, stack, grant.access_token, grant)
    return Proof(
        "forged tokens (other key, edited, unsigned)",
        f"{refused} of {tried} refused on three doors; the genuine one {'accepted' if genuine else 'REFUSED'}",
        refused == tried and genuine,
    )


def expired_token(stack: Stack, old_grant: Grant, exchange: Callable[[], Grant]) -> Proof:
    """A token that was good when the demo began, after its time; beside it one that ``exchange`` gives then."""
    remaining_s = old_grant.expires_at_s - time.time()
    if remaining_s > 0:
        # The token's end is a fact of the clock: there is no event to wait for.
        time.sleep(remaining_s + 1.0)
    age_s = time.time() - old_grant.expires_at_s
    refused = _refused(UnauthenticatedError, _try_wire, stack, old_grant.access_token, old_grant)
    refused = refused and _refused(UnauthenticatedError, _try_grpc, stack, old_grant.access_token, old_grant)
    fresh_grant = exchange()
    fresh = not _refused(SalternError, _try_wire, stack, fresh_grant.access_token, fresh_grant)
    return Proof(
        "a token past its time",
        f"{'refused' if refused else 'ACCEPTED'} {age_s:.0f} s after its end; a fresh one "
        f"{'accepted' if fresh else 'REFUSED'}",
        refused and fresh,
    )


def foreign_namespace(stack: Stack, grant: Grant, foreign: str, exchange: Callable[[str], object]) -> Proof:
    """A genuine token used to open another tenant's namespace, and the API key to obtain a token for it."""
    at_node = _namespace_answer(stack, grant, foreign)
    absent = _namespace_answer(stack, grant, "no-such-namespace")
    try:
        exchange(foreign)
        at_control = False
    except SalternError as error:
        at_control = isinstance(error, PermissionDeniedError)
    holds = at_node == "NAMESPACE_NOT_AVAILABLE" and at_control and at_node == absent
    return Proof(
        f"{grant.tenant} opens the namespace {foreign}",
        f"node: {at_node or 'OPENED'}, as for one that does not exist: {absent or 'OPENED'}; "
        f"control plane: {'refused' if at_control else 'ISSUED A TOKEN'}",
        holds,
    )


def put_past_limit(client: Client, limit_bytes: int, block_bytes: int, neighbour: Client, ids: Sequence[int]) -> Proof:
    """Put half as much again as the limit: own entries make room or the put is refused; the neighbour loses nothing."""
    keys = neighbour.block_keys(map(engine_block_hash, ids))
    before = neighbour.exists(keys)
    stored = refused = odd = 0
    blocks = limit_bytes * 3 // 2 // block_bytes
    for start in range(0, blocks, _FLOOD_BATCH_BLOCKS):
        batch = [
            (BlockKey(secrets.token_bytes(KEY_BYTES)), block_payload("flood", index, block_bytes))
            for index in range(start, min(start + _FLOOD_BATCH_BLOCKS, blocks))
        ]
        for outcome in client.put_many(batch):
            match outcome:
                case Stored():
                    stored += 1
                case Refused(ResourceExhaustedError()):
                    refused += 1
                case _:
                    odd += 1
    lost = sum(before) - sum(neighbour.exists(keys))
    return Proof(
        f"{client.tenant} puts 1.5 times its limit",
        f"{stored} stored over its own oldest, {refused} refused with a typed error, {odd} otherwise; "
        f"{neighbour.tenant} lost {lost} of {sum(before)}",
        odd == 0 and lost == 0 and stored + refused == blocks,
    )


def oversized_put(client: Client, block_bytes: int) -> Proof:
    """One entry that can never fit: refused before anything makes room for it (I6)."""
    (outcome,) = client.put_many([(BlockKey(secrets.token_bytes(KEY_BYTES)), bytes(block_bytes + 1))])
    reason = outcome.error.reason if isinstance(outcome, Refused) else type(outcome).__name__
    return Proof(
        "an entry one byte above block_bytes",
        f"refused: {reason}" if isinstance(outcome, Refused) else reason,
        isinstance(outcome, Refused) and isinstance(outcome.error, SalternError),
    )


def _hello(token: str, grant: Grant, namespace: str | None = None) -> Hello:
    return Hello(token=token, namespace=namespace or grant.namespace, epoch=grant.epoch, client="saltern demo")


def _namespace_answer(stack: Stack, grant: Grant, namespace: str) -> str:
    """The reason with which the node refuses a session on ``namespace``; empty if it opens one."""
    try:
        with BareSession(stack.wire_endpoint, timeout_ms=_TIMEOUT_MS) as session:
            session.call(Opcode.HELLO, _hello(grant.access_token, grant, namespace), HelloReply)
    except SalternError as error:
        return error.reason
    return ""


def _refused(kind: type[SalternError], door: Callable[[Stack, str, Grant], None], *arguments: Any) -> bool:
    try:
        door(*arguments)
    except SalternError as error:
        return isinstance(error, kind)
    return False


def _try_wire(stack: Stack, token: str, grant: Grant) -> None:
    with BareSession(stack.wire_endpoint, timeout_ms=_TIMEOUT_MS) as session:
        session.call(Opcode.HELLO, _hello(token, grant), HelloReply)


def _try_grpc(stack: Stack, token: str, grant: Grant) -> None:
    request = LookupBlocksRequest(namespace_id=grant.namespace, epoch=grant.epoch, keys=[bytes(KEY_BYTES)])
    with open_channel(stack.grpc_endpoint) as channel:
        _call(CacheServiceStub(channel).LookupBlocks, request, token, stack.grpc_endpoint)


def _try_control(stack: Stack, token: str, grant: Grant) -> None:
    with open_channel(stack.control) as channel:
        request = GetTenantRequest(name=f"tenants/{grant.tenant}")
        _call(TenantServiceStub(channel).GetTenant, request, token, stack.control)


def _call(method: Callable[..., object], request: object, token: str, endpoint: str) -> None:
    try:
        method(request, timeout=_TIMEOUT_MS / 1000, metadata=(("authorization", f"Bearer {token}"),))
    except grpc.RpcError as error:
        raise error_from_rpc(error, endpoint=endpoint) from None


def _resign(token: str, changes: dict[str, object]) -> str:
    """The same token, same kid, with ``changes`` to its claims, signed by a key of our own."""
    header, claims, _ = token.split(".")
    signed = f"{header}.{_encode(json.dumps({**_decode(claims), **changes}).encode())}"
    return f"{signed}.{_encode(Ed25519PrivateKey.generate().sign(signed.encode()))}"


def _edit(token: str, changes: dict[str, object]) -> str:
    """The token with ``changes`` to its claims under its old signature."""
    header, claims, signature = token.split(".")
    return f"{header}.{_encode(json.dumps({**_decode(claims), **changes}).encode())}.{signature}"


def _without_signature(token: str) -> str:
    header, claims, _ = token.split(".")
    unsigned = _encode(json.dumps({**_decode(header), "alg": "none"}).encode())
    return f"{unsigned}.{claims}."


def _decode(segment: str) -> dict[str, object]:
    decoded: dict[str, object] = json.loads(base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4)))
    return decoded


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
