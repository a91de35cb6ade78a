"""Administrative services: ``proto/saltern/admin/v1`` over the database. ``add_services`` puts them on a server."""

from __future__ import annotations

import grpc

from controlplane.admin.audit_events import AuditService
from controlplane.admin.credentials import CredentialService
from controlplane.admin.key_encryption_keys import KeyEncryptionKeyService
from controlplane.admin.namespaces import NamespaceService
from controlplane.admin.nodes import NodesService
from controlplane.admin.policy import PolicyService
from controlplane.admin.quotas import QuotaService
from controlplane.admin.salt_policies import SaltPolicyService
from controlplane.admin.service import AdminParts
from controlplane.admin.sharing_groups import SharingGroupService
from controlplane.admin.tenants import TenantService
from controlplane.admin.tokens import TokenService
from controlplane.admin.usage import UsageService
from saltern.admin.v1 import (
    audit_pb2_grpc,
    credentials_pb2_grpc,
    key_encryption_keys_pb2_grpc,
    namespaces_pb2_grpc,
    nodes_pb2_grpc,
    policy_pb2_grpc,
    quotas_pb2_grpc,
    salt_policies_pb2_grpc,
    sharing_groups_pb2_grpc,
    tenants_pb2_grpc,
    tokens_pb2_grpc,
    usage_pb2_grpc,
)

__all__ = ["SERVICE_NAMES", "AdminParts", "add_services"]

#: Full names, for health and reflection.
SERVICE_NAMES = tuple(
    servicer.service
    for servicer in (
        TenantService,
        NamespaceService,
        QuotaService,
        SaltPolicyService,
        SharingGroupService,
        CredentialService,
        TokenService,
        KeyEncryptionKeyService,
        AuditService,
        UsageService,
        NodesService,
        PolicyService,
    )
)


def add_services(server: grpc.aio.Server, parts: AdminParts) -> None:
    """Serve every administrative service on ``server``; its door must set the caller (``controlplane.caller``)."""
    tenants_pb2_grpc.add_TenantServiceServicer_to_server(TenantService(parts), server)
    namespaces_pb2_grpc.add_NamespaceServiceServicer_to_server(NamespaceService(parts), server)
    quotas_pb2_grpc.add_QuotaServiceServicer_to_server(QuotaService(parts), server)
    salt_policies_pb2_grpc.add_SaltPolicyServiceServicer_to_server(SaltPolicyService(parts), server)
    sharing_groups_pb2_grpc.add_SharingGroupServiceServicer_to_server(SharingGroupService(parts), server)
    credentials_pb2_grpc.add_CredentialServiceServicer_to_server(CredentialService(parts), server)
    tokens_pb2_grpc.add_TokenServiceServicer_to_server(TokenService(parts), server)
    key_encryption_keys_pb2_grpc.add_KeyEncryptionKeyServiceServicer_to_server(KeyEncryptionKeyService(parts), server)
    audit_pb2_grpc.add_AuditServiceServicer_to_server(AuditService(parts), server)
    usage_pb2_grpc.add_UsageServiceServicer_to_server(UsageService(parts), server)
    nodes_pb2_grpc.add_NodesServiceServicer_to_server(NodesService(parts), server)
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(PolicyService(parts), server)
