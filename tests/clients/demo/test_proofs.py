"""A proof that cannot fail proves nothing: each is run on a real stack where it holds, and where it must not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from saltern.admin_client import AdminClient, read_api_key
from saltern.auth.v1.auth_pb2 import AUDIENCE_CONTROL
from saltern.demo import proofs
from saltern.demo.member import Member
from saltern.demo.payload import block_payload, engine_block_hash
from saltern.demo.stack import Stack
from saltern.results import Stored

BLOCK_BYTES = 4096
LIMIT_BYTES = 256 * 1024
IDS = list(range(20))


@pytest.fixture(scope="module")
def admin(stack: Stack) -> Iterator[AdminClient]:
    with AdminClient(stack.control, read_api_key(stack.admin_api_key_file)) as client:
        yield client


@pytest.fixture(scope="module")
def members(admin: AdminClient) -> Iterator[tuple[Member, Member]]:
    """Two tenants; the first holds the blocks IDS."""
    quota = {"limit_bytes": LIMIT_BYTES, "reserved_bytes": LIMIT_BYTES, "block_bytes": BLOCK_BYTES}
    with (
        Member.join(admin, tenant="proof-a", namespace="space-a", **quota) as alpha,
        Member.join(admin, tenant="proof-b", namespace="space-b", **quota) as beta,
    ):
        keys = alpha.client.block_keys(map(engine_block_hash, IDS))
        stored = alpha.client.put_many(
            (key, block_payload("proof-a", block, BLOCK_BYTES)) for key, block in zip(keys, IDS, strict=True)
        )
        assert stored == [Stored()] * len(IDS)
        yield alpha, beta


def test_i2_foreign_reads_find_nothing_and_the_owner_everything(stack: Stack, members: tuple[Member, Member]) -> None:
    alpha, beta = members
    hits, proof = proofs.foreign_reads(alpha.client, beta.client, beta.exchange(), stack.wire_endpoint, IDS)
    assert (hits, proof.holds) == (0, True)
    hits, proof = proofs.foreign_reads(alpha.client, alpha.client, alpha.exchange(), stack.wire_endpoint, IDS)
    assert (hits > 2 * len(IDS), proof.holds) == (True, False)
    hits, proof = proofs.foreign_reads(alpha.client, beta.client, beta.exchange(), stack.wire_endpoint, [999])
    assert (hits, proof.holds) == (0, False), "without a block that the owner has, nothing is proven"


def test_i1_forged_tokens_are_refused_and_the_proof_sees_an_accepted_one(
    stack: Stack, admin: AdminClient, members: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    alpha, beta = members
    control_token = admin.exchange(AUDIENCE_CONTROL).access_token
    assert proofs.forged_tokens(stack, beta.exchange(), alpha.tenant, control_token).holds
    broken = replace(beta.exchange(), access_token=beta.exchange().access_token[:-4] + "AAAA")
    assert not proofs.forged_tokens(stack, broken, alpha.tenant, control_token).holds, "the control must be accepted"
    monkeypatch.setattr(proofs, "_without_signature", lambda token: token)
    assert not proofs.forged_tokens(stack, beta.exchange(), alpha.tenant, control_token).holds


def test_i1_a_live_token_does_not_pass_for_an_expired_one(stack: Stack, members: tuple[Member, Member]) -> None:
    _, beta = members
    pretended = replace(beta.exchange(), expires_at_s=0.0)
    assert not proofs.expired_token(stack, pretended, beta.exchange).holds


def test_i1_another_tenants_namespace_is_refused_like_an_absent_one(
    stack: Stack, members: tuple[Member, Member]
) -> None:
    alpha, beta = members
    assert proofs.foreign_namespace(stack, beta.exchange(), alpha.namespace, beta.exchange).holds
    assert not proofs.foreign_namespace(stack, beta.exchange(), beta.namespace, beta.exchange).holds


def test_i4_i5_a_flood_evicts_its_own_and_the_proof_sees_a_neighbours_loss(members: tuple[Member, Member]) -> None:
    alpha, beta = members
    flood = proofs.put_past_limit(beta.client, LIMIT_BYTES, BLOCK_BYTES, neighbour=alpha.client, ids=IDS)
    assert flood.holds
    assert "lost 0 of 20" in flood.outcome
    keys = beta.client.block_keys(map(engine_block_hash, IDS))
    beta.client.put_many((key, bytes(BLOCK_BYTES)) for key in keys)
    own = proofs.put_past_limit(beta.client, LIMIT_BYTES, BLOCK_BYTES, neighbour=beta.client, ids=IDS)
    assert not own.holds, "a flood that costs the counted blocks is seen"


def test_i6_an_entry_that_never_fits_is_refused(members: tuple[Member, Member]) -> None:
    _, beta = members
    assert proofs.oversized_put(beta.client, BLOCK_BYTES).holds
    assert not proofs.oversized_put(beta.client, BLOCK_BYTES - 1).holds
