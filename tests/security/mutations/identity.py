"""Who may do what: answers taken away one by one."""

from __future__ import annotations

from typing import Final

from tests.security.mutations.values import Edit, Mutation

_ADMIN: Final = "tests/controlplane/admin"
_AUTH: Final = "tests/controlplane/auth"
_TOKENS: Final = f"{_AUTH}/test_exchange_token.py"

MUTATIONS: Final = (
    Mutation(
        "a token with one thing wrong",
        (Edit("tenants/tokens.py", 'if header.get("typ") != _TYPE:', 'if not header.get("typ"):'),),
        (
            "tests/tenants/test_tokens.py::test_i1_a_bad_token_is_refused_for_its_own_reason",
            f"{_AUTH}/test_door.py::test_i1_every_bad_token_is_refused_with_its_reason",
            "tests/dataplane/io/test_session.py::test_i1_no_bad_token_opens_a_session",
            "tests/dataplane/io/test_grpc_door.py::test_i1_no_bad_token_is_let_in",
        ),
    ),
    Mutation(
        "a method of the control plane that is open by mistake",
        (
            Edit(
                "controlplane/auth/door.py",
                '    "saltern.auth.v1.AuthService": 256,\n',
                '    "saltern.auth.v1.AuthService": 256,\n    "saltern.admin.v1.UsageService": 64,\n',
            ),
        ),
        (f"{_AUTH}/test_door.py::test_i1_what_is_open_is_written_down_twice",),
    ),
    Mutation(
        "a method of the control plane that is open by mistake",
        (
            Edit(
                "controlplane/auth/door.py",
                "        if service in OPEN_SERVICES:\n",
                '        if service in OPEN_SERVICES or method.endswith("TenantService/GetTenant"):\n'
                '            service = "saltern.auth.v1.AuthService"\n',
            ),
        ),
        (f"{_AUTH}/test_door.py::test_i1_every_method_that_is_not_open_needs_a_token",),
    ),
    Mutation(
        "a tenant whose calls hold each other up",
        (Edit("controlplane/db/session.py", "self._shares.of(scope), self._sessions(", "self._sessions("),),
        (
            "tests/controlplane/db/test_shares.py::test_i10_transactions_of_one_tenant_leave_connections_to_others",
            f"{_AUTH}/test_door.py::test_i10_a_tenant_whose_calls_are_slow_does_not_take_every_connection",
        ),
    ),
    Mutation(
        "a tenant whose calls hold each other up",
        (
            Edit("controlplane/db/shares.py", "setdefault(scope.tenant, _Line", 'setdefault(TenantId("x"), _Line'),
            Edit("controlplane/db/shares.py", "del self._lines[scope.tenant]", 'self._lines.pop(TenantId("x"), None)'),
        ),
        ("tests/controlplane/db/test_shares.py::test_i10_a_tenant_has_its_share_and_all_others_have_the_rest",),
    ),
    Mutation(
        "a tenant named in a request instead of in the token",
        (
            Edit(
                "controlplane/caller.py",
                "if not caller.is_platform and tenant is not None and caller.tenant != tenant:",
                "if False:",
            ),
        ),
        (
            f"{_ADMIN}/test_authorisation.py::test_i2_a_tenants_caller_cannot_tell_what_is_forbidden_from_what_is_absent",
        ),
    ),
    Mutation(
        "a tenant named in a request instead of in the token",
        (
            Edit(
                "dataplane/core/admission.py",
                "if namespace is None or requested_namespace != claims_namespace:",
                "if namespace is None:",
            ),
        ),
        ("tests/dataplane/io/test_session.py::test_i1_i2_a_foreign_and_an_absent_namespace_get_the_same_answer",),
    ),
    Mutation(
        "a service that forgets to authorise",
        (Edit("controlplane/db/row_security.py", "            return tenant\n", "            return EVERY_TENANT\n"),),
        (f"{_ADMIN}/test_row_security.py::test_i2_services_that_forget_to_authorise_leak_nothing_of_another_tenant",),
    ),
    Mutation(
        "statements that work around row-level security",
        (
            Edit(
                "migrations/row_security.py",
                "visible = f\"{_SETTING} = '*' OR {tenant} = {_SETTING}\"",
                'visible = "true"',
            ),
        ),
        ("tests/controlplane/db/test_row_security.py::test_i2_no_statement_reads_a_neighbours_row",),
    ),
    Mutation(
        "statements that work around row-level security",
        (
            Edit(
                "controlplane/db/catalogue.py",
                "AND NOT (relrowsecurity AND relforcerowsecurity)",
                "AND NOT relrowsecurity",
            ),
        ),
        ("tests/controlplane/db/test_catalogue.py::test_i2_a_table_without_its_policies_is_refused",),
    ),
    Mutation(
        "statements that work around row-level security",
        (
            Edit(
                "controlplane/db/row_security.py",
                "return PlatformScope() if caller.tenant is None else TenantScope(caller.tenant)",
                "return PlatformScope()",
            ),
        ),
        (
            f"{_ADMIN}/test_row_security.py"
            "::test_i2_services_that_forget_to_authorise_give_a_tenant_nothing_of_the_platforms",
        ),
    ),
    Mutation(
        "a tenant's administrator who gives out",
        (
            Edit(
                "controlplane/admin/credentials.py",
                "allowed = PLATFORM_ROLES if tenant is None else TENANT_ROLES",
                "allowed = PLATFORM_ROLES | TENANT_ROLES",
            ),
        ),
        (f"{_ADMIN}/test_credentials.py::test_i1_a_tenant_admin_never_gives_out_a_role_of_the_platform",),
    ),
    Mutation(
        "a tenant's administrator who gives out",
        (
            Edit(
                "tenants/roles.py",
                "- {Permission.ENTRIES_READ, Permission.ENTRIES_WRITE, Permission.NODE_SERVE},",
                "- {Permission.NODE_SERVE},",
            ),
        ),
        ("tests/tenants/test_roles.py::test_i2_nobody_of_the_platform_touches_entries",),
    ),
    Mutation(
        "one node's key used as another node",
        (Edit("controlplane/node/identity.py", "if caller.node == node or (", "if caller.node is not None or ("),),
        (
            "tests/controlplane/node/test_node_identity.py::test_i1_a_key_of_one_node_cannot_be_another",
            "tests/controlplane/node/test_node_identity.py::test_a_rotation_and_a_binding_go_together",
        ),
    ),
    Mutation(
        "a process of a node that was fenced off",
        (
            Edit(
                "controlplane/node/registry.py",
                "if row is None or row.fencing_epoch != fencing_epoch:",
                "if row is None:",
            ),
        ),
        ("tests/controlplane/node/test_node_service.py::test_a_new_process_of_a_node_fences_the_old_one",),
    ),
    Mutation(
        "a process of a node that was fenced off",
        (
            Edit(
                "dataplane/control_client.py",
                "                if isinstance(error, AbortedError):\n",
                "                if False:\n",
            ),
        ),
        ("tests/dataplane/test_control_client.py::test_i8_a_fenced_node_registers_again",),
    ),
    Mutation(
        "tokens after their end",
        (
            Edit(
                "dataplane/io/gate.py",
                "if tenant is not None and (claims.issued_at_s < tenant.min_issue_time_s or "
                "tenant.revocations.covers(claims)):",
                "if False:",
            ),
        ),
        (
            "tests/dataplane/test_tokens_end_to_end.py"
            "::test_i10_revoked_tokens_are_refused_at_every_door_and_the_next_is_good",
        ),
    ),
    Mutation(
        "tokens after their end",
        (
            Edit(
                "dataplane/io/gate.py",
                "if key_set.issuer == claims.issuer and key_set.keys.get(claims.kid) == self._key_set.keys[claims.kid]",
                "if key_set.issuer == claims.issuer",
            ),
        ),
        (
            "tests/dataplane/test_tokens_end_to_end.py"
            "::test_i10_a_withdrawn_key_is_refused_by_every_door_and_the_nodes_stay",
        ),
    ),
    Mutation(
        "tokens after their end",
        (Edit("controlplane/auth/verifier.py", "if found.is_revoked or (min_issue_time", "if (min_issue_time"),),
        (f"{_AUTH}/test_door.py::test_i10_a_token_that_was_revoked_by_its_id_is_refused_at_once",),
    ),
    Mutation(
        "a flood of revocations",
        (
            Edit(
                "tenants/revocation.py",
                "        return Revoked((), is_widened=True)\n",
                "        return Revoked(tuple(by_prefix.values())[-REVOCATIONS_MAX:], is_widened=False)\n",
            ),
        ),
        ("tests/tenants/test_revocation.py::test_i10_a_flood_of_revocations_ends_more_tokens_and_never_fewer",),
    ),
    Mutation(
        "a flood of revocations",
        (Edit("tenants/revocation.py", "KEEP_S: Final = LIFETIME_MAX_S + 2 * CLOCK_SKEW_S", "KEEP_S: Final = 600"),),
        ("tests/tenants/test_revocation.py::test_i10_the_set_never_forgets_a_token_that_could_be_used_and_is_bounded",),
    ),
    Mutation(
        "the old secret of a rotated key",
        (
            Edit(
                "controlplane/auth/exchange.py",
                "None if lookup == key.lookup else key.previous_expire_time)",
                "None)",
            ),
        ),
        (f"{_AUTH}/test_rotation.py::test_no_token_outlives_the_secret_that_it_came_from",),
    ),
    Mutation(
        "the old secret of a rotated key",
        (
            Edit(
                "controlplane/auth/exchange.py",
                'reason="API_KEY_INVALID",',
                'reason="API_KEY_INVALID" if credential is None else "API_KEY_WRONG",',
            ),
        ),
        (f"{_AUTH}/test_exchange.py::test_i10_every_refusal_of_a_key_reads_the_same",),
    ),
    Mutation(
        "a token that was handed over",
        (
            Edit(
                "tenants/salts.py",
                "if wanted and wanted != getattr(given, level) and index <= narrowest:",
                "if False:",
            ),
        ),
        (f"{_TOKENS}::test_i2_a_request_narrows_further_and_never_beside_or_wider",),
    ),
    Mutation(
        "a token that was handed over",
        (Edit("controlplane/auth/exchange_token.py", "group=await _group_of(session, claims)", "group=None"),),
        (f"{_TOKENS}::test_i2_a_token_of_a_sharing_group_gives_the_groups_salts_while_it_is_in_it",),
    ),
    Mutation(
        "a token that was handed over",
        (Edit("controlplane/auth/exchange_token.py", "audience=Audience.NODE", "audience=Audience.CONTROL"),),
        (f"{_TOKENS}::test_i1_tokens_off_the_profile_are_refused_for_their_own_reason_and_never_recorded",),
    ),
    Mutation(
        "a token that was handed over",
        (Edit("controlplane/auth/verifier.py", "    require_active(credential.tenant)\n", ""),),
        (f"{_TOKENS}::test_i10_every_way_in_which_a_token_ends_ends_what_it_gives",),
    ),
    Mutation(
        "exchanging tokens without end",
        (
            Edit(
                "controlplane/auth/exchange_token.py",
                "if self._by_tenant[tenant] >= TENANT_EXCHANGES_MAX:",
                "if False:",
            ),
        ),
        (f"{_TOKENS}::test_i2_a_tenant_that_asks_without_end_takes_no_place_from_others",),
    ),
    Mutation(
        "two redemptions of the bootstrap token",
        (
            Edit(
                "controlplane/auth/bootstrap.py",
                ".where(models.Bootstrap.token_sha256 == _sha256(token), models.Bootstrap.redeemed_time.is_(None))",
                ".where(models.Bootstrap.token_sha256 == _sha256(token))",
            ),
        ),
        (f"{_AUTH}/test_bootstrap.py::test_exactly_one_of_many_redemptions_wins",),
    ),
)
