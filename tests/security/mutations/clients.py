"""Clients and whoever stands between them and a node: answers taken away one by one."""

from __future__ import annotations

from typing import Final

from tests.security.mutations.values import Edit, Mutation

_SDK: Final = "tests/clients/sdk"
_TLS: Final = "tests/dataplane/io/test_tls.py"

FAULTS: Final = (
    Mutation(
        "wrong bytes served",
        (
            Edit(
                "clients/saltern/transport/tcp.py",
                "slot.hit(view) if checksum(view) == sum_ else",
                "slot.hit(view) if sum_ else",
            ),
        ),
        (f"{_SDK}/test_i10_faults.py::test_i7_wrong_bytes_are_never_a_hit",),
    ),
    Mutation(
        "wrong bytes served",
        (
            Edit(
                "clients/saltern/transport/shm.py",
                "            for buffer in self._being_written:\n                buffer.doubt(drain)\n",
                "",
            ),
        ),
        (f"{_SDK}/test_i10_faults.py::test_i7_a_late_node_never_writes_over_memory_in_use",),
    ),
    Mutation(
        "the control plane or its database away",
        (
            Edit(
                "clients/saltern/credentials.py",
                "        if usable:\n            return current\n        try:\n",
                "        try:\n",
            ),
        ),
        (f"{_SDK}/test_stack.py::test_i9_clients_go_on_without_the_control_plane",),
    ),
    Mutation(
        "an engine that hangs because the cache does",
        (
            Edit(
                "clients/saltern/breaker.py",
                "            if now_s >= self._opens_until_s and now_s >= self._probe_until_s:\n",
                "            if True:\n",
            ),
        ),
        (
            f"{_SDK}/test_i10_faults.py"
            "::test_i10_frozen_node_is_a_miss_within_the_deadline_and_is_asked_once_each_backoff",
        ),
    ),
    Mutation(
        "an engine that hangs because the cache does",
        (
            Edit(
                "clients/saltern/async_client.py",
                "        work = self._executor.submit(call, deadline)\n",
                "        work = self._executor.submit(call, deadline)\n        work.exception()\n",
            ),
        ),
        (f"{_SDK}/test_async_client.py::test_i10_a_frozen_node_does_not_stop_the_event_loop",),
    ),
)

NETWORK: Final = (
    Mutation(
        "a socket in a node's place",
        (Edit("clients/saltern/transport/impostor.py", "    if uid not in trusted_uids(path):\n", "    if False:\n"),),
        (f"{_SDK}/test_impostor.py::test_i1_no_token_goes_to_a_strangers_socket",),
    ),
    Mutation(
        "a socket in a node's place",
        (Edit("clients/saltern/cli/stack.py", 'if not Path("/proc", str(run["pid"])).exists():', "if False:"),),
        (
            "tests/clients/cli/test_offline.py"
            "::test_i1_the_admins_key_does_not_go_to_the_port_of_a_stack_that_was_killed",
        ),
    ),
    Mutation(
        "connections to gRPC that call nothing",
        (Edit("clients/saltern/rpc_connections.py", '"grpc.max_connection_idle_ms"', '"grpc.max_connection_idle"'),),
        (
            "tests/clients/test_rpc_connections.py"
            "::test_i10_connections_without_a_call_take_no_place_of_the_control_plane_for_long",
        ),
    ),
    Mutation(
        "connections to gRPC that call nothing",
        (Edit("clients/saltern/rpc_connections.py", '"grpc.max_allowed_incoming_', '"grpc.max_incoming_'),),
        (
            "tests/clients/test_rpc_connections.py"
            "::test_i10_connections_without_a_call_take_no_place_of_a_node_for_long",
        ),
    ),
    Mutation(
        "a name, a message or a field from a server",
        (Edit("clients/saltern/cli/failure.py", "return text if text.isprintable() else", "return text if text else"),),
        ("tests/clients/cli/test_hostile_server.py::test_i10_no_text_of_a_server_drives_the_terminal",),
    ),
    Mutation(
        "a name, a message or a field from a server",
        (
            Edit(
                "clients/saltern/cli/failure.py",
                'click.echo("\\n".join(map(_printable, text.split("\\n"))), err=err, nl=nl)',
                "click.echo(text, err=err, nl=nl)",
            ),
        ),
        ("tests/clients/cli/test_hostile_server.py::test_i10_no_text_of_a_server_drives_the_terminal",),
    ),
    Mutation(
        "reading, changing or answering on the path",
        (
            Edit(
                "clients/saltern/tls.py",
                "    context.hostname_checks_common_name = False\n",
                "    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE\n",
            ),
        ),
        (f"{_TLS}::test_i10_a_certificate_of_another_authority_is_refused",),
    ),
    Mutation(
        "reading, changing or answering on the path",
        (
            Edit(
                "clients/saltern/tls.py",
                "    context.hostname_checks_common_name = False\n",
                "    context.check_hostname = False\n",
            ),
        ),
        (f"{_TLS}::test_i10_a_certificate_for_another_host_is_refused",),
    ),
    Mutation(
        "a client certificate without a token",
        (
            Edit(
                "dataplane/io/gate.py",
                "        claims = verify_token(token, self._key_set, audience=Audience.NODE, now_s=now_s)\n",
                "        try:\n"
                "            claims = verify_token(token, self._key_set, audience=Audience.NODE, now_s=now_s)\n"
                "        except UnauthenticatedError:\n"
                "            tenant = next(iter(self._core.policy.tenants))\n"
                "            claims = Claims(\n"
                '                issuer="", subject="", audience=Audience.NODE, tenant=tenant,\n'
                '                namespace=NamespaceId("chat"), role=next(iter(PERMISSIONS)),\n'
                '                issued_at_s=now_s, expires_at_s=now_s + 60, token_id="",\n'
                "            )\n",
            ),
        ),
        (f"{_TLS}::test_i1_a_certificate_opens_no_session_without_a_token",),
    ),
    Mutation(
        "private keys that others may read",
        (
            Edit(
                "clients/saltern/tls.py",
                "            if is_secret and mode & stat.S_IRWXO:\n",
                "            if False:\n",
            ),
        ),
        ("tests/clients/test_tls_files.py::test_a_key_that_everybody_may_use_is_refused",),
    ),
    Mutation(
        "private keys that others may read",
        (
            Edit(
                "clients/saltern/tls_reload.py",
                "        try:\n            material = self.files.read()\n"
                "            context = server_context(material)\n"
                "        except SalternError as error:\n",
                "        material = self.files.read()\n        context = server_context(material)\n"
                "        if error := None:\n",
            ),
        ),
        (
            "tests/clients/test_tls_files.py::test_new_files_are_taken_and_broken_ones_change_nothing_and_are_reported_once",
        ),
    ),
    Mutation(
        "private keys that others may read",
        (
            Edit(
                "clients/saltern/tls.py",
                "    context.hostname_checks_common_name = False\n",
                "    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE\n",
            ),
        ),
        (f"{_TLS}::test_i10_an_expired_certificate_is_refused",),
    ),
    Mutation(
        "a core file with secrets in it",
        (
            Edit(
                "clients/saltern/core_files.py",
                "prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)",
                "prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)",
            ),
        ),
        ("tests/clients/test_core_files.py::test_i1_a_crash_leaves_no_core_file",),
    ),
    Mutation(
        "a name in a trace, in an audit event or in a report",
        (Edit("clients/saltern/spreadsheets.py", "if text.startswith(_FORMULA_STARTS)", "if not text"),),
        (
            "tests/clients/cli/test_strange_traces.py::test_i10_no_name_in_a_trace_is_run_by_what_opens_a_report",
            "tests/clients/audit/test_formats.py::test_no_cell_of_a_csv_is_a_formula",
        ),
    ),
)

MUTATIONS: Final = (*FAULTS, *NETWORK)
