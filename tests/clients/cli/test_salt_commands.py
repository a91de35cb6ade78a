"""``saltern salt`` and what belongs to it of ``key`` and ``token``, against the session's real stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from saltern.cli.failure import EXIT_USAGE

Saltern = Callable[..., Any]
_numbers = count(1)


@pytest.fixture
def tenant(saltern: Saltern) -> Iterator[str]:
    """A fresh tenant with the namespace ``chat``."""
    name = f"salted-{next(_numbers)}"
    assert saltern("tenant", "create", name).code == 0
    created = saltern(
        "namespace", "create", name, "chat", "--model-fingerprint", "m@1/bf16", "--block-tokens", "16",
        "--block-bytes", "64KiB",
    )  # fmt: skip
    assert created.code == 0
    yield name
    saltern("tenant", "delete", name, "--yes")


def epochs_of(policy: Any) -> list[str]:
    return [epoch["epoch"] for epoch in policy["epochs"]]


def test_a_salt_policy_is_shown_as_a_table_and_as_json(saltern: Saltern, tenant: str) -> None:
    shown = saltern("salt", "get", tenant)
    assert shown.code == 0
    for text in ("scope", "tenant", "on demand", "1d", "(current)"):
        assert text in shown.out

    policy = saltern("salt", "get", tenant, "-o", "json").json
    assert (policy["scope"], policy["epoch"], policy["gracePeriod"]) == ("SCOPE_TENANT", "1", "86400s")
    assert saltern("salt", "show", tenant, "-o", "json").json == policy


def test_a_schedule_is_set_and_taken_back(saltern: Saltern, tenant: str) -> None:
    policy = saltern("salt", "set", tenant, "--rotate-every", "30d", "--grace", "2h", "-o", "json").json
    assert (policy["rotationPeriod"], policy["gracePeriod"]) == ("2592000s", "7200s")
    assert policy["nextRotationTime"]
    shown = saltern("salt", "get", tenant).out
    assert "every 30d" in shown and "2h" in shown

    policy = saltern("salt", "set", tenant, "--no-schedule", "--no-grace", "-o", "json").json
    assert "rotationPeriod" not in policy and policy["gracePeriod"] == "0s"
    assert epochs_of(policy) == ["1"]


def test_a_rotation_keeps_the_epoch_before_and_one_without_grace_asks_first(saltern: Saltern, tenant: str) -> None:
    policy = saltern("salt", "rotate", tenant, "-o", "json").json
    assert epochs_of(policy) == ["1", "2"] and policy["epochs"][0]["readUntilTime"]

    unasked = saltern("salt", "rotate", tenant, "--no-grace")
    assert unasked.code == EXIT_USAGE and "--yes" in unasked.err
    assert epochs_of(saltern("salt", "get", tenant, "-o", "json").json) == ["1", "2"]

    assert epochs_of(saltern("salt", "rotate", tenant, "--no-grace", "--yes", "-o", "json").json) == ["3"]


def test_a_rotation_asks_too_where_the_policy_has_no_grace(saltern: Saltern, tenant: str) -> None:
    assert saltern("salt", "set", tenant, "--no-grace").code == 0
    assert saltern("salt", "rotate", tenant).code == EXIT_USAGE
    assert epochs_of(saltern("salt", "rotate", tenant, "--grace", "1h", "-o", "json").json) == ["1", "2"]


def test_a_scope_is_changed_after_a_question_and_then_demands_a_name(
    saltern: Saltern, tenant: str, tmp_path: Path
) -> None:
    assert saltern("salt", "set", tenant, "--scope", "user").code == EXIT_USAGE
    policy = saltern("salt", "set", tenant, "--scope", "user", "--yes", "-o", "json").json
    assert (policy["scope"], epochs_of(policy)) == ("SCOPE_USER", ["2"])
    assert saltern("salt", "set", tenant, "--scope", "user").code == 0, "it is that already: nothing to ask"

    free, bound = tmp_path / "free.key", tmp_path / "bound.key"
    create = ("key", "create", "--tenant", tenant, "--role", "writer")
    assert saltern(*create, "free", "--save", str(free)).code == 0
    assert saltern(*create, "bound", "--project", "p-1", "--user", "ann", "--save", str(bound)).code == 0
    listed = saltern("key", "list", "--tenant", tenant).out
    assert "project p-1, user ann" in listed

    issue = ("token", "issue", "--namespace", "chat", "-o", "json", "--show")
    refused = saltern("--api-key-file", str(free), *issue)
    assert refused.code == 5 and "SALT_SCOPE_REQUIRED" in refused.err
    named = saltern("--api-key-file", str(free), *issue, "--project", "p-1", "--user", "ann").json["saltKeys"]
    assert saltern("--api-key-file", str(bound), *issue).json["saltKeys"] == named
    outside = saltern("--api-key-file", str(bound), *issue, "--user", "bob")
    assert outside.code == 3 and "OUTSIDE_KEY_BINDING" in outside.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("set", "acme"),
        ("set", "acme", "--scope", "group"),
        ("set", "acme", "--rotate-every", "1d", "--no-schedule"),
        ("set", "acme", "--grace", "1d", "--no-grace"),
        ("rotate", "acme", "--grace", "1d", "--no-grace"),
        ("rotate", "acme", "--grace", "soon"),
    ],
)
def test_what_contradicts_itself_is_a_usage_error(offline: Saltern, arguments: tuple[str, ...]) -> None:
    assert offline("salt", *arguments).code == EXIT_USAGE
