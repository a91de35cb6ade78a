"""Bills, the audit trail, secrets: answers taken away one by one."""

from __future__ import annotations

from typing import Final

from tests.security.mutations.values import Edit, Mutation

_ADMIN: Final = "tests/controlplane/admin"
_AUDIT: Final = "tests/controlplane/audit"

BILLS: Final = (
    Mutation(
        "a bill made larger or smaller",
        (
            Edit("controlplane/core/metering.py", "if sequence <= process.sequence:", "if False:"),
            Edit("controlplane/metering/intake.py", "if report.sequence <= row.sequence:", "if False:"),
        ),
        ("tests/controlplane/metering/test_metering_store.py::test_i8_reports_that_come_late_twice_or_not_at_all",),
    ),
    Mutation(
        "a bill made larger or smaller",
        (
            Edit(
                "controlplane/metering/records.py",
                "        statement = statement.where(table.tenant_uid == query.tenant_uid)\n",
                "        pass\n",
            ),
        ),
        (f"{_ADMIN}/test_usage_records.py::test_i2_a_tenant_reads_its_own_records_and_nothing_of_a_namesake",),
    ),
    Mutation(
        "a bill made larger or smaller",
        (
            Edit(
                "migrations/versions/0012_metering.py",
                "IF NEW.hour >= state.closed_from AND NEW.hour < state.closed_until THEN",
                "IF true THEN",
            ),
            Edit(
                "migrations/versions/0012_metering.py",
                "IF OLD.hour < now() - interval '60 days' THEN",
                "IF true THEN",
            ),
        ),
        ("tests/controlplane/metering/test_metering_store.py::test_i11_nobody_changes_a_closed_hour",),
    ),
    Mutation(
        "a node that lies about a tenant's use",
        (
            Edit(
                "controlplane/metering/readings.py",
                "min(held.get(quotas_pb2.TIER_DRAM, 0), capacities_bytes[Tier.DRAM])",
                "held.get(quotas_pb2.TIER_DRAM, 0)",
            ),
        ),
        (
            "tests/controlplane/metering/test_metering_store.py"
            "::test_i8_a_node_that_lies_makes_nobodys_bill_larger_than_it_could_have_been",
        ),
    ),
    Mutation(
        "a node that lies about a tenant's use",
        (Edit("controlplane/metering/messages.py", "return min(int(total), _INT64_MAX)", "return int(total)"),),
        (
            "tests/controlplane/metering/test_metering_store.py"
            "::test_i8_counts_beyond_all_reason_do_not_keep_hours_from_being_closed",
        ),
    ),
)

_RECORD_IF_IT_CAN_BE: Final = """
_record = record


async def record(session, **fields):
    try:
        async with session.begin_nested():
            return await _record(session, **fields)
    except Exception:
        return 0


"""

AUDIT: Final = (
    Mutation(
        "an act without its audit row",
        (Edit("controlplane/admin/service.py", "            if witness.is_there:\n", "            if False:\n"),),
        (
            "tests/security/test_audit_catalogue.py"
            "::test_i11_every_act_leaves_one_row_in_each_chain_that_it_touches_and_reading_none",
        ),
    ),
    Mutation(
        "an act without its audit row",
        (
            Edit(
                "controlplane/admin/service.py",
                "            await _record_denied(servicer, function.__name__, request, error)\n"
                "            raise\n        version",
                "            raise\n        version",
            ),
        ),
        (
            "tests/security/test_audit_catalogue.py"
            "::test_i11_every_denial_leaves_one_row_in_the_chain_of_whoever_tried_and_says_of_what",
        ),
    ),
    Mutation(
        "an act without its audit row",
        (
            Edit(
                "controlplane/admin/service.py", '_RequestT = TypeVar("', f'{_RECORD_IF_IT_CAN_BE}_RequestT = TypeVar("'
            ),
        ),
        (f"{_AUDIT}/test_no_audit_no_act.py::test_i11_no_audit_no_act",),
    ),
    Mutation(
        "a flood of denials that hides one",
        (Edit("controlplane/audit/denials.py", " or of_actor >= ROWS_PER_ACTOR", ""),),
        (f"{_AUDIT}/test_denials.py::test_i11_no_key_hides_the_attempts_of_another",),
    ),
    Mutation(
        "a trail that was edited, cut, reordered",
        (
            Edit(
                "clients/saltern/audit/verification.py",
                "            faults = self._walk.step(record)\n",
                "            self._walk.step(record)\n            faults = ()\n",
            ),
        ),
        ("tests/clients/audit/test_verification.py::test_i11_each_attack_on_the_events_is_found_where_it_is",),
    ),
    Mutation(
        "a trail that was edited, cut, reordered",
        (
            Edit(
                "clients/saltern/audit/verification.py",
                "if self._signed[sequence] == event_hash:",
                "if sequence in self._signed:",
            ),
        ),
        (f"{_AUDIT}/test_export_command.py::test_i11_a_database_owner_who_writes_the_whole_chain_anew_is_found",),
    ),
    Mutation(
        "checkpoints signed with a stolen old key",
        (
            Edit(
                "clients/saltern/audit/verification.py",
                "if not period.from_us - CLOCK_SLACK_US <= checkpoint.time_us <= until_us + CLOCK_SLACK_US:",
                "if False:",
            ),
            Edit(
                "clients/saltern/audit/verification.py",
                "if until_us is not None and self._now_us - until_us > self._unsigned_span_max_us:",
                "if False:",
            ),
        ),
        ("tests/clients/audit/test_verification.py::test_i11_a_stolen_old_key_signs_nothing_newer",),
    ),
    Mutation(
        "checkpoints signed with a stolen old key",
        (Edit("clients/saltern/objects.py", 'mode="create"', 'mode="overwrite"'),),
        (
            f"{_AUDIT}/test_object_sink.py"
            "::test_i11_of_two_writers_one_gets_the_next_number_and_nothing_is_ever_replaced",
        ),
    ),
    Mutation(
        "checkpoints signed with a stolen old key",
        (
            Edit(
                "controlplane/audit/object_sink.py",
                "return [int(match[1]) for match in map(_NUMBERED.search, names) if match]",
                "return [int(_NUMBERED.search(name)[1]) for name in names]",
            ),
        ),
        (f"{_AUDIT}/test_object_sink.py::test_what_somebody_else_puts_beside_checkpoints_stops_none",),
    ),
    Mutation(
        "a secret in a log, an error, an event",
        (
            Edit(
                "clients/saltern/cli/failure.py",
                "    text = without_secrets(text) if err else text\n",
                "",
            ),
        ),
        (
            "tests/security/test_canary_processes.py"
            "::test_i11_no_secret_of_real_processes_is_in_any_of_their_output_or_files",
        ),
    ),
    Mutation(
        "a secret in a log, an error, an event",
        (
            Edit(
                "controlplane/audit/redaction.py",
                'return _SECRET_BEGINNING.sub("<secret>", text)',
                "return text",
            ),
            Edit("clients/saltern/errors.py", "self.message = without_secrets(message)", "self.message = message"),
        ),
        (f"{_AUDIT}/test_canaries.py::test_i11_no_secret_is_in_any_export_log_or_error",),
    ),
    Mutation(
        "a secret in a log, an error, an event",
        (Edit("clients/saltern/errors.py", "self.message = without_secrets(message)", "self.message = message"),),
        ("tests/clients/test_errors.py::test_i1_no_error_shows_a_secret_that_was_pasted_into_a_field",),
    ),
    Mutation(
        "a secret in a log, an error, an event",
        (
            Edit(
                "clients/saltern/tracing.py",
                "reason = error.reason if isinstance(error, SalternError) else type(error).__name__",
                "reason = str(error)",
            ),
        ),
        ("tests/clients/test_tracing.py::test_an_error_is_told_by_its_reason_and_not_by_what_it_says",),
    ),
)

SECRETS: Final = (
    Mutation(
        "secrets left under an old key-encryption key",
        (Edit("controlplane/admin/key_encryption_keys.py", "    if count:\n", "    if False:\n"),),
        (
            "tests/controlplane/key_encryption/test_service.py"
            "::test_a_retired_key_stays_while_a_secret_that_cannot_be_wrapped_anew_is_under_it",
        ),
    ),
    Mutation(
        "secrets left under an old key-encryption key",
        (Edit("migrations/wrapped_columns.py", "AND retire_time IS NOT NULL)", "AND false)"),),
        (
            "tests/controlplane/key_encryption/test_rotation.py"
            "::test_i12_the_database_refuses_what_a_forgotten_control_plane_wraps_with_a_retired_key",
        ),
    ),
    Mutation(
        "a socket in the KMS plug-in's place",
        (Edit("controlplane/key_encryption/kms.py", "        self._require_trusted_socket()\n", ""),),
        (
            "tests/controlplane/key_encryption/test_kms.py"
            "::test_no_key_is_shown_to_a_socket_that_anybody_may_have_put_there",
        ),
    ),
)

MUTATIONS: Final = (*BILLS, *AUDIT, *SECRETS)
