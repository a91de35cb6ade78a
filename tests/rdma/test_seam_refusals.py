"""What a device refuses, and what the seam makes of it: the attacker gets an error, the memory stays as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from saltern.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from saltern.rdma import Access, CompletionStatus, LocalSpan, Read, RemoteSpan, Write
from tests.rdma.sides import Side, connected

_REFUSED = {CompletionStatus.REMOTE_ACCESS, CompletionStatus.REMOTE_INVALID_REQUEST}


@pytest.mark.parametrize("verb", [Read, Write])
@pytest.mark.parametrize("key", ["local_key", "remote_key", "zero", "its own"])
def test_i3_no_key_opens_the_nodes_memory(binding: str, verb: type[Read | Write], key: str) -> None:
    """Told the true address and every key there is, a client reads nothing and writes nothing."""
    with connected(binding, binding) as (node, client):
        node.memory[:4096] = b"N" * 4096
        client.memory[:4096] = b"c" * 4096
        keys = {"zero": 0, "its own": client.region.remote_key}
        remote_key = keys[key] if key in keys else getattr(node.region, key)
        (ended,) = client.run(verb((client.region.local(0, 4096),), RemoteSpan(node.region.address, 4096, remote_key)))
        assert ended.status in _REFUSED
        assert client.pair.is_broken
        assert node.memory[:4096] == b"N" * 4096
        assert client.memory[:4096] == b"c" * 4096


def test_i3_a_local_region_describes_itself_to_nobody(binding: str) -> None:
    with connected(binding, binding) as (node, _), pytest.raises(FailedPreconditionError) as caught:
        node.region.remote(0, 1)
    assert caught.value.reason == "RDMA_LOCAL_ONLY"


_FORGERIES: dict[str, Callable[[Side], RemoteSpan]] = {
    "forged key": lambda client: RemoteSpan(client.region.address, 64, client.region.remote_key ^ 0x5A),
    "key 0": lambda client: RemoteSpan(client.region.address, 64, 0),
    "before the region": lambda client: RemoteSpan(client.region.address - 32, 64, client.region.remote_key),
    "past the region": lambda client: RemoteSpan(
        client.region.address + client.region.length_bytes - 32, 64, client.region.remote_key
    ),
    "end of the address space": lambda client: RemoteSpan(2**64 - 64, 64, client.region.remote_key),
}


@pytest.mark.parametrize("forgery", _FORGERIES)
def test_a_false_description_ends_in_an_error_of_its_own_queue_pair(binding: str, forgery: str) -> None:
    with connected(binding, binding) as (node, client):
        (ended,) = node.run(Write((node.region.local(0, 64),), _FORGERIES[forgery](client)))
        assert ended.status in _REFUSED
        error = ended.to_error()
        assert isinstance(error, InvalidArgumentError)
        assert error.reason == "RDMA_REMOTE_ACCESS"
        assert error.hint


def test_a_range_that_wraps_is_refused_before_it_reaches_the_device(binding: str) -> None:
    with connected(binding, binding) as (node, client):
        for address in (2**64 - 63, 2**64, -1):
            with pytest.raises(InvalidArgumentError) as caught:
                node.run(Write((node.region.local(0, 64),), RemoteSpan(address, 64, client.region.remote_key)))
            assert caught.value.reason == "RDMA_RANGE_INVALID"
        assert node.run(Write((node.region.local(0, 64),), client.region.remote(0, 64)))[0].ok


def test_a_true_description_of_another_domain_is_refused(binding: str) -> None:
    """A tenant's address and key, sent by another tenant over its own queue pair."""
    with connected(binding, binding) as (node, mallory), connected(binding, binding) as (_, alice):
        alice.memory[:64] = b"a" * 64
        (ended,) = node.run(Read((node.region.local(0, 64),), alice.region.remote(0, 64)))
        assert ended.status in _REFUSED
        assert node.memory[:64] == bytes(64)
        assert mallory.memory[:64] == bytes(64)


def test_a_bad_request_amid_a_batch_is_one_failed_completion_and_flushes_the_rest(binding: str) -> None:
    with connected(binding, binding) as (node, client):
        node.memory[:300] = b"x" * 300
        good = [Write((node.region.local(100 * n, 100),), client.region.remote(100 * n, 100)) for n in range(3)]
        bad = Write((node.region.local(0, 100),), RemoteSpan(client.region.address, 100, 1))
        (batch,) = node.pair.plan([good[0], bad, good[1]])
        (behind,) = node.pair.plan([good[2]])
        node.pair.post(batch, "batch")
        node.pair.post(behind, "behind")
        first, second = node.collect(2)
        assert first.token == "batch"
        assert first.status in _REFUSED
        assert (second.token, second.status) == ("behind", CompletionStatus.FLUSHED)
        assert client.memory[100:300] == bytes(200), "what comes behind the bad request is not carried out"
        assert node.completions.collect() == []
        with pytest.raises(UnavailableError) as caught:
            node.pair.post(behind, "after")
        assert caught.value.reason == "RDMA_QUEUE_PAIR_ENDED"


def test_i7_a_closed_region_is_revoked(binding: str) -> None:
    with connected(binding, binding) as (node, client):
        described = client.region.remote(0, 64)
        assert node.run(Write((node.region.local(0, 64),), described))[0].ok
        client.region.close()
        client.memory[:64] = b"m" * 64
        (ended,) = node.run(Write((node.region.local(0, 64),), described))
        assert ended.status in _REFUSED
        assert client.memory[:64] == b"m" * 64


def test_a_peer_that_is_gone_ends_in_silence_within_its_retries(binding: str) -> None:
    with connected(binding, binding) as (node, client):
        described = client.region.remote(0, 64)
        client.pair.close()
        (ended,) = node.run(Write((node.region.local(0, 64),), described))
        assert ended.status is CompletionStatus.RETRIES_EXCEEDED
        error = ended.to_error()
        assert isinstance(error, DeadlineExceededError)
        assert error.reason == "RDMA_PEER_SILENT"
        assert "MTU" in error.hint


def test_what_is_posted_when_a_queue_pair_closes_ends_as_flushed(binding: str) -> None:
    with connected(binding, binding) as (node, client):
        described = client.region.remote(0, 64)
        client.pair.close()  # so that nothing can be acknowledged
        (chain,) = node.pair.plan([Write((node.region.local(0, 64),), described)] * 3)
        node.pair.post(chain, "under way")
        node.pair.close()
        ended = node.completions.collect()
        assert [(each.token, each.ok) for each in ended] == [("under way", False)]
        assert node.completions.outstanding == 0
        node.memory[:64] = b"reuse it"[:8] * 8  # I7: its queue pair is gone


def test_failing_a_queue_pair_flushes_what_is_posted(binding: str) -> None:
    with connected(binding, binding) as (_, client):
        client.pair.post_receives(["a", "b"])
        client.pair.fail()
        ended = client.collect(2)
        assert [(each.token, each.status) for each in ended] == [
            ("a", CompletionStatus.FLUSHED),
            ("b", CompletionStatus.FLUSHED),
        ]
        assert isinstance(ended[0].to_error(), UnavailableError)


def test_a_wrong_local_key_is_our_own_fault(binding: str) -> None:
    with connected(binding, binding) as (node, client):
        forged = LocalSpan(node.region.address, 64, node.region.local_key ^ 0x5A)
        try:
            (ended,) = node.run(Write((forged,), client.region.remote(0, 64)))
        except Exception as error:  # some devices refuse it as it is posted
            assert getattr(error, "reason", "") in ("RDMA_VERB_FAILED", "RDMA_RESOURCES")
        else:
            assert ended.status in (CompletionStatus.LOCAL_PROTECTION, CompletionStatus.LOCAL_QUEUE_PAIR_OPERATION)
            assert ended.to_error().reason == "RDMA_LOCAL_FAULT"
        assert node.pair.is_broken
        assert node.region.access is Access.LOCAL_WRITE
