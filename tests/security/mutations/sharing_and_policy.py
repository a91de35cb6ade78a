"""Salts, sharing groups, quotas over nodes, what nodes go by: answers taken away one by one."""

from __future__ import annotations

from typing import Final

from tests.security.mutations.values import Edit, Mutation

_ADMIN: Final = "tests/controlplane/admin"

SALTS_AND_SHARING: Final = (
    Mutation(
        "a salt of another project",
        (Edit("tenants/salts.py", "if bound and asked and asked != bound:", "if False:"),),
        ("tests/tenants/test_salts.py::test_i2_a_salt_is_never_wider_than_the_binding_and_the_policy",),
    ),
    Mutation(
        "a salt of another project",
        (
            Edit(
                "clients/saltern/keys.py",
                'encoded += kind + len(value).to_bytes(8, "little") + value',
                "encoded += kind + value",
            ),
        ),
        (
            "tests/clients/test_keys.py::test_i2_parts_that_are_written_like_the_inside_of_a_frame_are_one_part_all_the_same",
        ),
    ),
    Mutation(
        "a salt of another project",
        (
            Edit(
                "clients/saltern/keys.py",
                '_TYPE_BYTES, _TYPE_TEXT, _TYPE_INTEGER = b"b", b"s"',
                '_TYPE_BYTES, _TYPE_TEXT, _TYPE_INTEGER = b"s", b"s"',
            ),
        ),
        ("tests/clients/test_keys.py::test_i2_frames_are_equal_only_for_equal_arguments",),
    ),
    Mutation(
        "entries of a salt epoch past its grace",
        (Edit("controlplane/salts/epochs.py", "        if row.epoch in numbers:\n", "        if False:\n"),),
        (
            f"{_ADMIN}/test_salt_policies.py"
            "::test_i12_a_rotation_without_grace_destroys_every_earlier_root_in_the_same_act",
        ),
    ),
    Mutation(
        "entries of a salt epoch past its grace",
        (
            Edit(
                "dataplane/core/admission.py",
                "if partition.epoch not in namespace.epochs_of(partition.group_uid):",
                "if False:",
            ),
        ),
        (
            "tests/controlplane/salts/test_end_to_end.py"
            "::test_i12_rotation_under_traffic_moves_writes_keeps_reads_and_then_leaves_nothing",
        ),
    ),
    Mutation(
        "another tenant's entries through a sharing group",
        (
            Edit(
                "dataplane/core/admission.py",
                "if partition.epoch not in namespace.epochs_of(partition.group_uid):",
                "if False:",
            ),
        ),
        ("tests/dataplane/io/test_sharing_doors.py::test_i2_the_old_epoch_opens_nothing_and_its_files_are_gone",),
    ),
    Mutation(
        "a rotation that is cut off",
        (
            Edit(
                "controlplane/salts/epochs.py",
                "    policy.next_rotation_time = next_rotation_time(current, period)\n",
                "    next_rotation_time(current, period)\n",
            ),
        ),
        (
            "tests/controlplane/salts/test_kill.py"
            "::test_i11_i12_a_scheduled_rotation_that_was_cut_off_happens_once_and_whole",
        ),
    ),
    Mutation(
        "a rotation that is cut off",
        (
            Edit(
                "controlplane/salts/epochs.py",
                "    wrapped = await new_root(key_encryption_key, root_secret_context(tenant_uid, begun.number))\n",
                "    wrapped = epochs[-1].wrapped_root_secret\n",
            ),
        ),
        (
            f"{_ADMIN}/test_salt_policies.py"
            "::test_i12_each_rotation_begins_an_epoch_with_a_root_of_its_own_and_keeps_the_others_for_the_grace",
        ),
    ),
    Mutation(
        "another tenant's entries through a sharing group",
        (
            Edit(
                "controlplane/node/policy_rows.py",
                "            .where(member.accept_time.is_not(None))\n"
                "            .order_by(group.uid, member.accept_time,",
                "            .order_by(group.uid, member.accept_time,",
            ),
        ),
        (f"{_ADMIN}/test_sharing_groups.py::test_i2_nothing_is_shared_before_both_have_accepted",),
    ),
    Mutation(
        "another tenant's entries through a sharing group",
        (
            Edit(
                "controlplane/admin/sharing_groups.py",
                "            await _take_out(session, group, member)\n"
                "            await rotate(self._parts.key_encryption_key, group)\n",
                "            await _take_out(session, group, member)\n            group.row.revision += 1\n",
            ),
        ),
        (f"{_ADMIN}/test_sharing_groups.py::test_i12_whoever_leaves_takes_the_salt_along_at_once",),
    ),
    Mutation(
        "another tenant's entries through a sharing group",
        (
            Edit(
                "dataplane/core/admission.py",
                "if any((it.tenant, it.namespace_uid) == (partition.tenant, partition.namespace_uid) for it in named):",
                "if named is not None:",
            ),
        ),
        ("tests/dataplane/core/test_sharing.py::test_i2_who_does_not_name_a_peer_is_not_read_by_it",),
    ),
    Mutation(
        "another tenant's entries through a sharing group",
        (
            Edit(
                "dataplane/core/admission.py",
                "if its == partition or check_partition(policy, its) is not None:",
                "if its == partition:",
            ),
        ),
        ("tests/dataplane/core/test_sharing.py::test_i2_half_of_a_policy_shares_nothing",),
    ),
    Mutation(
        "finding out whether a tenant exists by inviting",
        (
            Edit(
                "controlplane/admin/sharing_groups.py",
                "                witnesses.append(Witness(tenant, None, view(group, tenant), is_there=is_there))\n",
                "                if not is_there:\n"
                "                    raise absent(caller, request.namespace)\n"
                "                witnesses.append(Witness(tenant, None, view(group, tenant), is_there=is_there))\n",
            ),
        ),
        (f"{_ADMIN}/test_sharing_groups.py::test_i2_an_invitation_says_nothing_of_the_tenant_that_is_invited",),
    ),
    Mutation(
        "finding out whether a tenant exists by inviting",
        (
            Edit(
                "controlplane/admin/service.py",
                "                else:\n                    await bump_policy_version(session, now, change.tenant)\n",
                "",
            ),
        ),
        (f"{_ADMIN}/test_sharing_groups.py::test_i2_policy_versions_do_not_tell_whether_an_invited_tenant_is_there",),
    ),
)

QUOTAS_AND_POLICY: Final = (
    Mutation(
        "more than the quota over several nodes",
        (
            Edit(
                "controlplane/core/leases.py",
                "free_bytes = quota_bytes - sum(believed.values())",
                "free_bytes = quota_bytes - sum(granted.values())",
            ),
        ),
        ("tests/sim_leases/test_sim_leases.py::test_i4_i9_rules_hold_under_faults",),
    ),
    Mutation(
        "reserving more than there is",
        (Edit("controlplane/admin/quotas.py", "            await lock_quotas(session)\n", ""),),
        (f"{_ADMIN}/test_quotas.py::test_i5_holds_when_reservations_are_made_at_a_time",),
    ),
    Mutation(
        "waiting for policies without end",
        (
            Edit(
                "controlplane/admin/policy.py",
                " or (tenant is not None and self._waits[tenant] >= TENANT_WAITS_MAX)",
                "",
            ),
        ),
        (
            "tests/controlplane/node/test_policy_wait.py"
            "::test_a_tenant_that_waits_without_end_takes_no_place_from_others",
        ),
    ),
    Mutation(
        "being served by a policy that was said to be gone",
        (
            Edit(
                "controlplane/core/policy_reach.py",
                "if known.applied_version >= version and is_alone:",
                "if is_alone:",
            ),
        ),
        ("tests/controlplane/node/test_policy_wait.py::test_a_refusal_is_no_acknowledgement",),
    ),
    Mutation(
        "a database put back to before a revocation",
        (Edit("controlplane/restored.py", "was_restored = version < self._seen and", "was_restored = False and"),),
        (
            "tests/controlplane/test_restored.py"
            "::test_i9_nodes_follow_a_restored_database_at_once_and_forget_what_it_does_not_know",
        ),
    ),
    Mutation(
        "a database put back to before a revocation",
        (
            Edit(
                "controlplane/restored.py",
                "if self._told_time is not None and now - self._told_time < TOLD_EVERY:",
                "if False:",
            ),
        ),
        (
            "tests/controlplane/test_restored.py"
            "::test_i10_a_node_that_tells_of_restores_again_and_again_is_believed_once_and_named",
        ),
    ),
    Mutation(
        "a deleted tenant, namespace or entry that comes back",
        (Edit("controlplane/admin/tenants.py", "            await session.delete(row)\n", ""),),
        (f"{_ADMIN}/test_tenants.py::test_i12_deleting_a_tenant_leaves_nothing_but_its_audit_chain",),
    ),
    Mutation(
        "PostgreSQL, a control plane or a node killed",
        (Edit("controlplane/db/durability.py", 'if value == "off":', "if False:"),),
        (
            "tests/controlplane/db/test_durability.py"
            "::test_i11_a_database_that_answers_before_it_has_written_is_refused_in_words",
        ),
    ),
    Mutation(
        "PostgreSQL, a control plane or a node killed",
        (
            Edit(
                "dataplane/control_client.py",
                "                self.link.lost(monotonic(), error.reason)\n",
                "                raise\n",
            ),
        ),
        (
            "tests/faults/test_faults.py"
            "::test_i9_i10_i11_a_part_that_fails_is_felt_where_it_must_be_and_nothing_acknowledged_is_lost",
        ),
    ),
)

MUTATIONS: Final = (*SALTS_AND_SHARING, *QUOTAS_AND_POLICY)
