"""Clients outlive what they were made for: a namespace that is deleted and made anew is served to them again (I12)."""

from __future__ import annotations

import pytest

from saltern.errors import PermissionDeniedError
from saltern.results import Error, Hit, Lookup, Miss, Stored
from tests.support.clients import blocks, node_client
from tests.support.static_node import MIB, static_node, tenant_policy


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_i12_a_namespace_made_anew_is_empty_and_served_to_a_client_of_the_old_one(transport: str) -> None:
    items = blocks(3, 1000)
    keys = [key for key, _ in items]
    policy = tenant_policy(limit_bytes=8 * MIB)
    with static_node({"acme": policy}, dram_bytes=16 * MIB) as node, node_client(node, transport) as client:
        assert client.put_many(items) == [Stored()] * 3
        node.apply({"acme": tenant_policy(limit_bytes=8 * MIB, uid="uid-2")})
        assert client.lookup(keys) == Lookup(0, (False,) * 3)
        assert client.get_many(keys) == [Miss()] * 3
        assert client.put_many(items) == [Stored()] * 3
        assert all(isinstance(result, Hit) for result in client.get_many(keys))
        node.check_invariants()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_i10_a_namespace_that_is_gone_is_refused_and_one_that_comes_back_is_served(transport: str) -> None:
    items = blocks(1, 1000)
    policy = tenant_policy(limit_bytes=8 * MIB)
    without = tenant_policy(limit_bytes=8 * MIB, namespaces=())
    with static_node({"acme": policy}, dram_bytes=16 * MIB) as node, node_client(node, transport) as client:
        for _ in range(2):
            assert client.put_many(items) == [Stored()]
            node.apply({"acme": without})
            for _ in range(2):
                [result] = client.put_many(items)
                assert isinstance(result, Error) and isinstance(result.error, PermissionDeniedError)
                assert result.error.reason == "NAMESPACE_NOT_AVAILABLE"
            node.apply({"acme": policy})
        assert client.put_many(items) == [Stored()]
