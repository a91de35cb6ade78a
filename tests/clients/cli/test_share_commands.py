"""``saltern share`` against the session's real stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from saltern.cli.failure import EXIT_USAGE

Saltern = Callable[..., Any]
_numbers = count(1)


@pytest.fixture
def pair(saltern: Saltern) -> Iterator[tuple[str, str]]:
    """Two fresh tenants, each with a namespace ``chat`` of one model."""
    number = next(_numbers)
    names = f"sharer-{number}", f"joiner-{number}"
    for name in names:
        assert saltern("tenant", "create", name).code == 0
        created = saltern(
            "namespace", "create", name, "chat", "--model-fingerprint", "m@1/bf16", "--block-tokens", "16",
            "--block-bytes", "64KiB",
        )  # fmt: skip
        assert created.code == 0
    yield names
    for name in names:
        saltern("tenant", "delete", name, "--yes")


def test_a_group_from_its_making_to_its_end(saltern: Saltern, pair: tuple[str, str]) -> None:
    owner, other = pair
    group, member = f"{owner}/research", f"{other}/chat"
    created = saltern("share", "create", group, "--namespace", "chat", "-o", "json")
    assert created.code == 0 and created.json["name"] == f"tenants/{owner}/sharingGroups/research"
    assert "invited" in saltern("share", "invite", group, member).out
    listed = saltern("share", "list", other)
    assert "invited" in listed.out and group in listed.out
    assert (
        saltern("share", "list", owner, "-o", "json").json["sharing_groups"][0]["members"][1]["state"]
        == "STATE_INVITED"
    )

    accepted = saltern("share", "accept", group, f"tenants/{other}/namespaces/chat", "--yes", "--wait")
    assert accepted.code == 0 and accepted.out.count("(accepted since") == 2
    assert "member" in saltern("share", "list", other).out
    seen = saltern("share", "get", f"tenants/{owner}/sharingGroups/research", "--as", other)
    assert seen.code == 0 and member.split("/")[0] in seen.out

    left = saltern("share", "leave", group, member, "--yes", "--wait")
    assert left.code == 0 and "has left" in left.out
    assert saltern("share", "get", group, "-o", "json").json["epoch"] == "2"
    saltern("share", "invite", group, member)
    assert "declined" in saltern("share", "decline", group, member).out
    saltern("share", "invite", group, member)
    assert saltern("share", "remove", group, member, "--yes").code == 0
    assert saltern("share", "delete", group, "--yes").code == 0
    assert saltern("share", "list", owner, "-o", "json").json == {"sharing_groups": []}


@pytest.mark.parametrize("command", ["accept", "leave", "remove"])
def test_what_changes_who_reads_asks_first(saltern: Saltern, command: str) -> None:
    refused = saltern("share", command, "acme/research", "blue/chat")
    assert refused.code == EXIT_USAGE and "--yes" in refused.err


@pytest.mark.parametrize("group", ["acme", "acme/", "/x", "acme/a/b", "tenants/acme/namespaces/chat"])
def test_a_name_that_is_none_is_refused_before_anything_is_asked(saltern: Saltern, group: str) -> None:
    assert saltern("share", "get", group).code == EXIT_USAGE
