"""The console: answers taken away one by one."""

from __future__ import annotations

from typing import Final

from tests.security.mutations.values import Edit, Mutation

_CONSOLE: Final = "tests/controlplane/console"

MUTATIONS: Final = (
    Mutation(
        "a form of another site",
        (
            Edit(
                "controlplane/console/visit.py",
                'if not is_form_token(session.cookie, visit.form.get("form_token", "")):',
                "if False:",
            ),
        ),
        (f"{_CONSOLE}/test_pages.py::test_a_change_that_another_site_asks_for_is_refused",),
    ),
    Mutation(
        "text of a stranger that a page of the console",
        (Edit("controlplane/console/templating.py", "autoescape=True", "autoescape=False"),),
        (f"{_CONSOLE}/test_pages.py::test_text_of_a_stranger_is_never_markup",),
    ),
    Mutation(
        "text of a stranger that a page of the console",
        (
            Edit(
                "controlplane/console/guard.py",
                'headers = [*message["headers"], *self._headers]',
                'headers = [*message["headers"]]',
            ),
        ),
        (f"{_CONSOLE}/test_pages.py::test_every_answer_has_the_headers_and_names_no_other_site",),
    ),
    Mutation(
        "a session of the console that goes on",
        (
            Edit(
                "controlplane/console/sessions.py",
                "if row.expire_time <= now or row.use_time + IDLE_MAX <= now:",
                "if row.expire_time <= now:",
            ),
        ),
        (f"{_CONSOLE}/test_sessions.py::test_i10_a_session_ends_without_use_and_a_page_that_refreshes_itself_is_none",),
    ),
    Mutation(
        "a session of the console that goes on",
        (
            Edit(
                "controlplane/console/routes/entrance.py",
                "    await visit.console.sessions.end(visit.session.cookie)\n",
                "",
            ),
        ),
        (f"{_CONSOLE}/test_sessions.py::test_i10_logging_out_ends_the_session_everywhere",),
    ),
    Mutation(
        "a session of the console that goes on",
        (
            Edit(
                "controlplane/console/visit.py",
                "    await console.sessions.end(session.cookie)\n    console.services.forget(session)\n",
                "",
            ),
        ),
        (f"{_CONSOLE}/test_sessions.py::test_i10_a_revoked_key_ends_the_session_at_once",),
    ),
    Mutation(
        "a cookie of the console that was planted",
        (
            Edit(
                "controlplane/console/sessions.py",
                "sealed=seal(cookie, msgspec.msgpack.encode(login)),",
                "sealed=msgspec.msgpack.encode(login),",
            ),
            Edit(
                "controlplane/console/sessions.py",
                "msgspec.msgpack.decode(unseal(cookie, row.sealed), type=Login)",
                "msgspec.msgpack.decode(row.sealed, type=Login)",
            ),
        ),
        (f"{_CONSOLE}/test_sessions.py::test_no_credential_is_in_the_database_the_log_or_a_page",),
    ),
    Mutation(
        "a cookie of the console that was planted",
        (
            Edit(
                "controlplane/console/sessions.py",
                "        cookie = new_cookie()\n",
                '        cookie = Cookie("A" * 43)\n',
            ),
        ),
        (f"{_CONSOLE}/test_sessions.py::test_i1_a_session_begins_under_a_cookie_that_nobody_has_seen",),
    ),
    Mutation(
        "another tenant's id in a path of the console",
        (Edit("controlplane/console/visit.py", '{"RESOURCE_NOT_AVAILABLE": 404, ', "{"),),
        (f"{_CONSOLE}/test_pages.py::test_i2_another_tenants_page_is_the_same_as_that_of_one_that_is_not_there",),
    ),
    Mutation(
        "a browser without a certificate",
        (Edit("controlplane/console/serving.py", "    outer.verify_mode = context.verify_mode\n", ""),),
        (f"{_CONSOLE}/test_tls.py::test_with_a_client_authority_a_browser_without_a_certificate_gets_no_page",),
    ),
    Mutation(
        "somebody who says that their call comes from another address",
        (
            Edit(
                "controlplane/auth/vouching.py",
                "if not hmac.compare_digest(shown, self._secret):",
                "if False:",
            ),
        ),
        ("tests/controlplane/auth/test_vouching.py::test_i11_nobody_else_is_believed_where_a_call_is_from",),
    ),
    Mutation(
        "a stranger who fails to log in to the console",
        (
            Edit(
                "controlplane/console/login.py",
                "    source = source_of(address)\n",
                "    source = secret.strip()[:27]\n",
            ),
        ),
        (f"{_CONSOLE}/test_sessions.py::test_i10_a_stranger_keeps_nobody_out_of_their_own_key",),
    ),
    Mutation(
        "a stranger who fails to log in to the console",
        (Edit("controlplane/console/attempts.py", "(level + 1.0, now_s)", "(level, now_s)"),),
        (f"{_CONSOLE}/test_sessions.py::test_of_many_logins_at_a_time_no_more_are_tried_than_may_fail",),
    ),
    Mutation(
        "a stranger who fails to log in to the console",
        (Edit("controlplane/console/login.py", " or _TOKEN_FORM.fullmatch(token) is None", ""),),
        (f"{_CONSOLE}/test_sessions.py::test_an_access_token_logs_in_until_it_expires_and_a_node_s_never_does",),
    ),
    Mutation(
        "a `Host` header of another site's",
        (
            Edit(
                "controlplane/console/app.py",
                "app.router.redirect_slashes = False",
                "app.router.redirect_slashes = True",
            ),
        ),
        (f"{_CONSOLE}/test_pages.py::test_no_answer_leads_to_where_the_caller_says_this_host_is",),
    ),
    Mutation(
        "strangers at the console's port",
        (Edit("controlplane/console/serving.py", "metrics.counted(Turns(app))", "metrics.counted(app)"),),
        (f"{_CONSOLE}/test_turns.py::test_i10_strangers_at_the_console_leave_the_database_to_others",),
    ),
    Mutation(
        "strangers at the console's port",
        (
            Edit(
                "controlplane/console/turns.py",
                "            if has_turn:\n                has_turn = False\n",
                "            if False:\n                has_turn = False\n",
            ),
        ),
        (
            f"{_CONSOLE}/test_turns.py::"
            "test_i10_a_few_requests_are_worked_on_at_a_time_and_who_waits_for_a_browser_is_none_of_them",
        ),
    ),
    Mutation(
        "strangers at the console's port",
        (Edit("controlplane/console/turns.py", "            await asyncio.sleep(0)", "            assert True"),),
        (f"{_CONSOLE}/test_turns.py::test_i10_pages_that_wait_for_nothing_let_others_have_the_loop_too",),
    ),
)
