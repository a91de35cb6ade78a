"""Resource identifiers and resource names (AIP-122): one place that parses and builds them.

An identifier is a lower-case DNS label (RFC 1034): 1 to 63 characters of ``a-z 0-9 -``, starting with a letter and
not ending with a hyphen. So an identifier can stand in a path, a metric label, a file name and a log line as it is.

==============================================  ============================
resource                                        name
==============================================  ============================
tenant                                          ``tenants/{tenant}``
namespace                                       ``tenants/{tenant}/namespaces/{namespace}``
quota (one for each tenant)                     ``tenants/{tenant}/quota``
salt policy (one for each tenant)               ``tenants/{tenant}/saltPolicy``
sharing group (of the tenant that owns it)      ``tenants/{tenant}/sharingGroups/{group}``
API key of a tenant                             ``tenants/{tenant}/apiKeys/{api_key}``
API key of the platform                         ``apiKeys/{api_key}``
audit event of a tenant                         ``tenants/{tenant}/auditEvents/{sequence}``
audit event of the platform                     ``auditEvents/{sequence}``
node                                            ``nodes/{node}``
==============================================  ============================
"""

from __future__ import annotations

import re
from typing import NewType

from saltern.errors import InvalidArgumentError

TenantId = NewType("TenantId", str)
NamespaceId = NewType("NamespaceId", str)
NodeId = NewType("NodeId", str)
ApiKeyId = NewType("ApiKeyId", str)
SharingGroupId = NewType("SharingGroupId", str)

IDENTIFIER_MAX_CHARS = 63
_IDENTIFIER = re.compile(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
#: Never a tenant: it names the platform's own audit chain.
RESERVED_TENANT_IDS = frozenset({"platform"})


def parse_identifier(text: str, *, what: str) -> str:
    """Return ``text`` if it is a well-formed identifier.

    Raises:
        InvalidArgumentError: it is not; the message names ``what`` and shows at most 64 characters of the text.
    """
    if not isinstance(text, str) or _IDENTIFIER.fullmatch(text) is None:
        raise InvalidArgumentError(
            f"{what} {str(text)[:64]!r} is not a valid identifier",
            reason="INVALID_IDENTIFIER",
            hint="use 1 to 63 of a-z, 0-9 and -, starting with a letter, not ending with -",
            metadata={"field": what},
        )
    return text


def parse_tenant_id(text: str) -> TenantId:
    """Parse a tenant identifier; raises InvalidArgumentError for a malformed or reserved one."""
    identifier = parse_identifier(text, what="tenant")
    if identifier in RESERVED_TENANT_IDS:
        raise InvalidArgumentError(
            f"tenant {identifier!r} is a reserved identifier", reason="RESERVED_IDENTIFIER", hint="choose another name"
        )
    return TenantId(identifier)


def parse_namespace_id(text: str) -> NamespaceId:
    """Parse a namespace identifier; raises InvalidArgumentError for a malformed one."""
    return NamespaceId(parse_identifier(text, what="namespace"))


def parse_node_id(text: str) -> NodeId:
    """Parse a node identifier; raises InvalidArgumentError for a malformed one."""
    return NodeId(parse_identifier(text, what="node"))


def tenant_name(tenant: TenantId) -> str:
    return f"tenants/{tenant}"


def namespace_name(tenant: TenantId, namespace: NamespaceId) -> str:
    return f"tenants/{tenant}/namespaces/{namespace}"


def quota_name(tenant: TenantId) -> str:
    return f"tenants/{tenant}/quota"


def salt_policy_name(tenant: TenantId) -> str:
    return f"tenants/{tenant}/saltPolicy"


def sharing_group_name(owner: TenantId, group: SharingGroupId) -> str:
    return f"tenants/{owner}/sharingGroups/{group}"


def api_key_name(tenant: TenantId | None, api_key: ApiKeyId) -> str:
    return f"tenants/{tenant}/apiKeys/{api_key}" if tenant else f"apiKeys/{api_key}"


def audit_event_name(tenant: TenantId | None, sequence: int) -> str:
    return f"tenants/{tenant}/auditEvents/{sequence}" if tenant else f"auditEvents/{sequence}"


def node_name(node: NodeId) -> str:
    return f"nodes/{node}"


def _segments(name: str, pattern: str) -> list[str]:
    """Match ``name`` against a pattern such as ``tenants/*/namespaces/*``; return the starred segments."""
    expected, given = pattern.split("/"), name.split("/") if isinstance(name, str) else []
    if len(expected) != len(given) or any(e not in ("*", g) for e, g in zip(expected, given, strict=True)):
        raise InvalidArgumentError(
            f"resource name {str(name)[:128]!r} does not match {pattern.replace('*', '{id}')}",
            reason="INVALID_RESOURCE_NAME",
            hint=f"write {pattern.replace('*', '{id}')}",
        )
    return [g for e, g in zip(expected, given, strict=True) if e == "*"]


def parse_tenant_name(name: str) -> TenantId:
    return parse_tenant_id(_segments(name, "tenants/*")[0])


def parse_namespace_name(name: str) -> tuple[TenantId, NamespaceId]:
    tenant, namespace = _segments(name, "tenants/*/namespaces/*")
    return parse_tenant_id(tenant), parse_namespace_id(namespace)


def parse_quota_name(name: str) -> TenantId:
    return parse_tenant_id(_segments(name, "tenants/*/quota")[0])


def parse_salt_policy_name(name: str) -> TenantId:
    return parse_tenant_id(_segments(name, "tenants/*/saltPolicy")[0])


def parse_sharing_group_name(name: str) -> tuple[TenantId, SharingGroupId]:
    owner, group = _segments(name, "tenants/*/sharingGroups/*")
    return parse_tenant_id(owner), SharingGroupId(parse_identifier(group, what="sharing group"))


def parse_api_key_name(name: str) -> tuple[TenantId | None, ApiKeyId]:
    """Parse the name of a tenant's or the platform's API key; the tenant is None for the platform's."""
    if isinstance(name, str) and name.startswith("apiKeys/"):
        (key,) = _segments(name, "apiKeys/*")
        return None, ApiKeyId(parse_identifier(key, what="API key"))
    tenant, key = _segments(name, "tenants/*/apiKeys/*")
    return parse_tenant_id(tenant), ApiKeyId(parse_identifier(key, what="API key"))


def parse_node_name(name: str) -> NodeId:
    return parse_node_id(_segments(name, "nodes/*")[0])
