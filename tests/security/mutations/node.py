"""Walls inside a node: answers taken away one by one."""

from __future__ import annotations

from typing import Final

from tests.security.mutations.values import Edit, Mutation

_IO: Final = "tests/dataplane/io"
_CORE: Final = "tests/dataplane/core"

WALLS: Final = (
    Mutation(
        "another tenant's block",
        (Edit("dataplane/io/gate.py", "claims_tenant=claims.tenant,", "claims_tenant=next(iter(policy.tenants)),"),),
        (f"{_IO}/test_session.py::test_i2_two_tenants_with_one_key_hold_two_entries",),
    ),
    Mutation(
        "another tenant's block",
        (
            Edit(
                "dataplane/core/ssd_tier.py",
                "        owner = self.tenants.get(partition.tenant)\n"
                "        return None if owner is None else owner.partitions.get("
                "(partition.storage_uid, partition.epoch))",
                "        found = (owner.partitions.values() for owner in self.tenants.values())\n"
                "        return next((books for of_owner in found for books in of_owner), None)",
            ),
        ),
        (f"{_IO}/test_ssd_node.py::test_i2_another_tenant_finds_nothing_of_it",),
    ),
    Mutation(
        "another tenant's block",
        (
            Edit(
                "dataplane/core/adoption.py",
                "        pool.extents.take(ArenaOffset(offset), extent_bytes)\n",
                "        pass\n",
            ),
        ),
        (f"{_IO}/test_warm.py::test_i2_a_put_into_an_adopted_arena_takes_nobodys_memory",),
    ),
    Mutation(
        "a client that reads or writes a node's memory through",
        (Edit("dataplane/io/regions.py", "        self._space.claim(tenant, grown_bytes)\n", ""),),
        (f"{_IO}/test_regions.py::test_i2_a_tenant_cannot_map_every_address_of_the_node",),
    ),
    Mutation(
        "a client that reads or writes a node's memory through",
        (Edit("dataplane/io/regions.py", "        check_inside(self.size_bytes, offsets, sizes)\n", ""),),
        (f"{_IO}/test_regions.py::test_nothing_outside_the_region_is_touched",),
    ),
    Mutation(
        "a client that reads or writes a node's memory through",
        (
            Edit(
                "dataplane/io/transfers.py",
                "target = region.view(get.offsets[index], pin.size_bytes)\n"
                "                    yield from self._copy(batch.view(pin), target, piece_bytes)",
                "target = region.view(get.offsets[index], get.max_sizes[index])\n"
                "                    yield from self._copy(self._more(batch, pin), target, piece_bytes)",
            ),
            Edit(
                "dataplane/io/transfers.py",
                "    def _copy(self,",
                "    def _more(self, batch, pin):\n"
                "        return batch._blocks.arena.view(pin.offset, 4096)\n\n"
                "    def _copy(self,",
            ),
        ),
        (f"{_IO}/test_regions.py::test_i2_a_get_writes_nothing_past_the_entry",),
    ),
    Mutation(
        "a client that reads or writes a node's memory over RDMA",
        (
            Edit(
                "dataplane/io/rdma.py",
                "Access.LOCAL_WRITE)\n",
                "Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ)\n",
            ),
            Edit("dataplane/io/rdma.py", "access=Access.NONE,", "access=Access.REMOTE_WRITE | Access.REMOTE_READ,"),
        ),
        ("tests/rdma/test_rdma_attacks.py::test_i3_the_arena_cannot_be_reached_by_whoever_knows_all_about_it",),
        in_rdma_guest=True,
    ),
    Mutation(
        "a shared segment that is cut short",
        (Edit("dataplane/io/regions.py", "    if not seals & _F_SEAL_SHRINK:\n", "    if False:\n"),),
        (f"{_IO}/test_regions.py::test_only_memfds_sealed_against_shrinking_are_accepted",),
    ),
    Mutation(
        "a shared segment that is cut short",
        (
            Edit(
                "clients/saltern/transport/memory.py",
                "_F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW",
                "_F_ADD_SEALS, _F_SEAL_GROW",
            ),
        ),
        ("tests/clients/sdk/test_memory.py::test_i3_shared_memory_can_neither_shrink_nor_grow",),
    ),
    Mutation(
        "a shared segment that is cut short",
        (
            Edit(
                "dataplane/io/transfers.py",
                "digest = yield from self._copy_and_sum(region.view(put.offsets[index], size), target)",
                "digest = wire.checksum(region.view(put.offsets[index], size))\n"
                "                    yield from self._copy_and_sum(region.view(put.offsets[index], size), target)",
            ),
        ),
        (f"{_IO}/test_regions.py::test_i7_a_segment_rewritten_during_the_put_is_stored_as_claimed_or_not_at_all",),
    ),
    Mutation(
        "frames that lie",
        (
            Edit(
                "dataplane/io/batches.py",
                "        while self._tickets:\n            self._blocks.core.put_abort(self._tickets.popitem()[1])\n",
                "",
            ),
        ),
        (f"{_IO}/test_hostile_frames.py::test_i8_a_client_that_leaves_in_the_middle_leaves_nothing",),
    ),
    Mutation(
        "frames that lie",
        (
            Edit(
                "dataplane/io/batches.py",
                "            self._blocks.core.put_abort(self._tickets.popitem()[1])\n",
                "            self._blocks.core.put_commit(self._tickets.popitem()[1], 0, "
                "self._blocks.clock.monotonic_ns())\n",
            ),
        ),
        (
            f"{_IO}/test_hostile_frames.py"
            "::test_i8_entries_received_before_the_client_died_stay_only_if_their_sum_was_right",
        ),
    ),
    Mutation(
        "a member that fills, empties or blocks",
        (
            Edit(
                "dataplane/core/promotion.py",
                "    admitted = pool.admit(index, key, below.size_bytes, extent_bytes, now_ns)\n",
                "    payer = next(at for at in pool.open.values() if at.partition.tenant == source.tenant)\n"
                "    admitted = pool.admit(payer, key, below.size_bytes, extent_bytes, now_ns)\n",
            ),
        ),
        (f"{_IO}/test_ssd_sharing.py::test_i4_what_comes_from_a_peers_ssd_is_the_readers_to_pay",),
    ),
    Mutation(
        "a member that fills, empties or blocks",
        (Edit("dataplane/core/ssd_tier.py", "        if reader is None or reader == owner:\n", "        if True:\n"),),
        (f"{_IO}/test_ssd_sharing.py::test_i5_a_peers_interest_makes_nothing_hot_for_its_owner",),
    ),
)

BUDGETS: Final = (
    Mutation(
        "more than the limit",
        (
            Edit(
                "dataplane/core/pool.py", "if excess_bytes <= 0 and own_excess_bytes <= 0:", "if own_excess_bytes <= 0:"
            ),
            Edit(
                "dataplane/core/budget.py",
                '        assert self.used_bytes <= self.limit_bytes, "I4: charged past the limit"\n',
                "",
            ),
        ),
        (f"{_IO}/test_session.py::test_i4_i6_limits_hold_with_unfinished_puts_of_many_sessions",),
    ),
    Mutation(
        "more than the limit",
        (
            Edit(
                "dataplane/core/ssd_log.py",
                "fits_limits = all(books.used_bytes + need_bytes <= books.limit_bytes for books in (namespace, owner))",
                "fits_limits = all(books.used_bytes - books.leaving_bytes <= books.limit_bytes "
                "for books in (namespace, owner))",
            ),
        ),
        (
            f"{_IO}/test_ssd_room.py"
            "::test_i4_what_could_not_be_removed_yet_counts_and_nothing_is_written_past_the_limit",
        ),
    ),
    Mutation(
        "more than the quota over several nodes",
        (
            Edit(
                "dataplane/lease_line.py",
                "return min(self._node.settled_version, self._kept_version)",
                "return self._node.settled_version",
            ),
        ),
        ("tests/dataplane/test_lease_line.py::test_i4_nothing_is_settled_before_it_is_kept",),
    ),
    Mutation(
        "one namespace that pushes out",
        (
            Edit("dataplane/core/pool.py", "if excess_bytes <= 0 and own_excess_bytes <= 0:", "if excess_bytes <= 0:"),
            Edit(
                "dataplane/core/pool.py",
                "assert namespace.used_bytes <= namespace.limit_bytes,",
                "assert True,",
            ),
        ),
        (
            "tests/clients/cli/test_namespace_limits.py"
            "::test_i4_a_namespace_keeps_its_limit_and_its_neighbours_in_the_tenant_keep_theirs",
        ),
    ),
    Mutation(
        "evicting a tenant within its reservation",
        (
            Edit(
                "dataplane/core/budget.py",
                "self.reserved_bytes = self.protected_bytes = quota.reserved_bytes",
                "self.reserved_bytes = quota.reserved_bytes",
            ),
            Edit(
                "dataplane/core/tenant_cache.py",
                "            self.budget.protected_bytes = self.account.protected_bytes\n",
                "",
            ),
            Edit("dataplane/core/reading.py", "        budget.protected_bytes = owner.account.protected_bytes\n", ""),
        ),
        (
            f"{_CORE}/test_victims.py::test_i5_reserved_entries_survive_neighbours_flood",
            "tests/isolation/test_isolation.py"
            "::test_i5_a_flood_of_four_times_the_pool_takes_nothing_from_a_tenant_within_its_reservation",
        ),
    ),
    Mutation(
        "evicting a tenant within its reservation",
        (
            Edit(
                "dataplane/core/cache.py",
                "            note_missing(self._pool, index.owner, keys, answer[1])\n",
                "            pass\n",
            ),
        ),
        ("tests/clients/sdk/test_earning.py::test_i5_whoever_looks_up_before_it_reads_gets_its_reservation_back",),
    ),
    Mutation(
        "one put larger than the quota",
        (
            Edit(
                "dataplane/core/pool.py",
                "            if room is None:\n",
                "            if room is None:\n"
                "                for entry in [entry for entry in owner.order if not entry.pins]:\n"
                "                    self.evict(entry, EvictionCause.OWN_PUT)\n",
            ),
        ),
        (f"{_CORE}/test_victims.py::test_i6_scattered_pins_refuse_and_evict_nothing",),
    ),
    Mutation(
        "sessions that say nothing",
        (Edit("dataplane/io/session_table.py", 'next(iter(self._unopened)).close("GAVE_WAY")', "pass"),),
        (f"{_IO}/test_deadlines.py::test_i2_connections_that_say_nothing_keep_nobody_out",),
    ),
    Mutation(
        "sessions that say nothing",
        (
            Edit(
                "dataplane/io/grpc_door.py",
                "        if self._calls[who] >= TENANT_CALLS_MAX:\n",
                "        if self._calls.total() >= TENANT_CALLS_MAX:\n",
            ),
        ),
        (f"{_IO}/test_grpc_door.py::test_i2_calls_that_never_end_hold_up_their_own_tenant_only",),
    ),
)

DISKS: Final = (
    Mutation(
        "bytes in a store below the node that others reach",
        (
            Edit(
                "dataplane/core/segments.py",
                'raise BadFormatError("the payload does not verify") from None',
                "pass",
            ),
        ),
        (f"{_IO}/engines/test_object_engine.py::test_i7_changed_bytes_are_a_miss",),
    ),
    Mutation(
        "bytes in a store below the node that others reach",
        (
            Edit(
                "dataplane/core/segments.py",
                "        encryptor.update_into(payload, place[BLOCK_BYTES:end])\n",
                "        encryptor.update_into(payload, bytearray(len(payload)))\n"
                "        place[BLOCK_BYTES:end] = bytes(payload)\n",
            ),
        ),
        (f"{_IO}/engines/test_object_engine.py::test_i7_the_store_gets_no_plain_byte_and_no_name",),
    ),
    Mutation(
        "bytes in a store below the node that others reach",
        (Edit("dataplane/io/engines/objects.py", "            elif listed:\n", "            elif False:\n"),),
        (f"{_IO}/engines/test_object_engine.py::test_i12_a_deleted_tenant_namespace_or_epoch_leaves_nothing",),
    ),
    Mutation(
        "bytes in a store below the node that others reach",
        (Edit("dataplane/io/engines/objects.py", "        if Fetched.GONE in fetched:\n", "        if False:\n"),),
        (f"{_IO}/engines/test_object_engine.py::test_i10_vanished_records_are_misses_and_no_fault",),
    ),
    Mutation(
        "wrong bytes served",
        (
            Edit(
                "dataplane/core/segments.py",
                'raise BadFormatError("the payload does not verify") from None',
                "pass",
            ),
        ),
        (f"{_IO}/test_ssd_device.py::test_i7_a_rotten_record_is_a_miss_and_the_tier_says_so",),
    ),
    Mutation(
        "a deleted tenant, namespace or entry that comes back",
        (Edit("dataplane/io/gate.py", "        if grant.revision != self._revision:\n", "        if False:\n"),),
        (f"{_IO}/test_session.py::test_i12_a_deleted_tenant_is_gone_from_open_sessions",),
    ),
    Mutation(
        "a deleted tenant, namespace or entry that comes back",
        (Edit("dataplane/core/ssd_tier.py", "        if not self.is_known:\n", "        if False:\n"),),
        (f"{_IO}/test_ssd_outdated.py::test_i12_what_was_deleted_while_the_tier_was_off_does_not_come_back_with_it",),
    ),
    Mutation(
        "being served by a policy that was said to be gone",
        (
            Edit(
                "dataplane/policy_file.py",
                "        if not -_AHEAD_MAX_S <= age_s <= self.age_max_s:\n",
                "        if False:\n",
            ),
        ),
        ("tests/dataplane/test_node_process.py::test_i9_the_kept_policy_is_served_for_the_stated_window_only",),
    ),
    Mutation(
        "a kept policy that is cut, edited",
        (
            Edit(
                "dataplane/policy_log.py",
                "        if hashlib.sha256(previous + length + content).digest() != digest:\n",
                "        if False:\n",
            ),
        ),
        ("tests/dataplane/test_policy_log.py::test_i4_every_flipped_byte_is_found_and_never_an_older_policy",),
    ),
    Mutation(
        "a kept policy that is cut, edited",
        (
            Edit(
                "dataplane/policy_file.py",
                "            if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:\n",
                "            if facts.st_mode & 0o077:\n",
            ),
        ),
        ("tests/dataplane/test_policy_file.py::test_i10_another_users_file_is_refused",),
    ),
    Mutation(
        "the control plane or its database away",
        (
            Edit(
                "dataplane/control_client.py",
                "            except SalternError as error:\n                if isinstance(",
                "            except UnauthenticatedError as error:\n                if isinstance(",
            ),
        ),
        (
            "tests/dataplane/test_node_process.py"
            "::test_i9_a_node_serves_on_without_its_control_plane_and_finds_it_again",
        ),
    ),
)

MUTATIONS: Final = (*WALLS, *BUDGETS, *DISKS)
