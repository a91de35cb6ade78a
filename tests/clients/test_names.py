"""Identifiers and resource names: what is well formed, and nothing else, has exactly one reading."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saltern import names
from saltern.errors import InvalidArgumentError
from saltern.names import ApiKeyId, NamespaceId, NodeId, TenantId

identifiers = st.from_regex(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True).filter(lambda text: text != "platform")


@given(identifiers, identifiers)
def test_names_read_back_as_what_they_were_made_from(one: str, other: str) -> None:
    tenant, namespace = TenantId(one), NamespaceId(other)
    assert names.parse_tenant_name(names.tenant_name(tenant)) == one
    assert names.parse_namespace_name(names.namespace_name(tenant, namespace)) == (one, other)
    assert names.parse_quota_name(names.quota_name(tenant)) == one
    assert names.parse_salt_policy_name(names.salt_policy_name(tenant)) == one
    assert names.parse_api_key_name(names.api_key_name(tenant, ApiKeyId(other))) == (one, other)
    assert names.parse_api_key_name(names.api_key_name(None, ApiKeyId(other))) == (None, other)
    assert names.parse_node_name(names.node_name(NodeId(one))) == one


BAD_IDENTIFIERS = [
    "", "A", "1a", "-a", "a-", "a_b", "a.b", "a/b", "a b", " a", "a\n", "a\0", "é", "\u0430",  # the last is Cyrillic
    "a" * 64, "..", "*", "%61", None, 7, b"a",
]  # fmt: skip
PARSERS: list[Callable[[str], object]] = [names.parse_tenant_id, names.parse_namespace_id, names.parse_node_id]


@pytest.mark.parametrize("text", BAD_IDENTIFIERS, ids=repr)
@pytest.mark.parametrize("parse", PARSERS)
def test_malformed_identifiers_are_refused_with_a_hint(parse: Callable[[str], object], text: object) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse(text)  # type: ignore[arg-type]
    assert caught.value.reason == "INVALID_IDENTIFIER"
    assert caught.value.hint
    assert len(caught.value.message) < 200


def test_the_platform_is_no_tenant() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        names.parse_tenant_id("platform")
    assert caught.value.reason == "RESERVED_IDENTIFIER"


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (names.parse_tenant_name, "tenants"),
        (names.parse_tenant_name, "tenants/"),
        (names.parse_tenant_name, "tenants/a/"),
        (names.parse_tenant_name, "/tenants/a"),
        (names.parse_tenant_name, "tenants/a/b"),
        (names.parse_tenant_name, "Tenants/a"),
        (names.parse_namespace_name, "tenants/a/namespaces"),
        (names.parse_namespace_name, "tenants/a/namespaces/"),
        (names.parse_namespace_name, "tenants/a/quota/b"),
        (names.parse_namespace_name, "tenants//namespaces/b"),
        (names.parse_quota_name, "tenants/a/quotas"),
        (names.parse_quota_name, "tenants/a"),
        (names.parse_salt_policy_name, "tenants/a/saltpolicy"),
        (names.parse_api_key_name, "apiKeys"),
        (names.parse_api_key_name, "apiKeys/a/b"),
        (names.parse_api_key_name, "tenants/a/apiKeys/B"),
        (names.parse_node_name, "node/a"),
        (names.parse_node_name, ""),
        (names.parse_node_name, None),
    ],
)
def test_malformed_names_are_refused(parse: Callable[[object], object], text: object) -> None:
    with pytest.raises(InvalidArgumentError):
        parse(text)


@given(st.text(max_size=300))
def test_no_text_makes_a_parser_fail_otherwise(text: str) -> None:
    for parse in (
        names.parse_tenant_name,
        names.parse_namespace_name,
        names.parse_quota_name,
        names.parse_salt_policy_name,
        names.parse_api_key_name,
        names.parse_node_name,
    ):
        try:
            parse(text)
        except InvalidArgumentError as error:
            assert len(str(error)) < 600
