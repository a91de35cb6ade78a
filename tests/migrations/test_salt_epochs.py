"""0009 on a database in use: the root secret that a tenant has becomes the one of its first epoch, and opens there."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, text

import migrations
from controlplane.secrets import LocalKeyEncryptionKey, root_secret_context
from saltern.errors import FailedPreconditionError
from tests.migrations.test_migrations import in_transaction

KEY = LocalKeyEncryptionKey(bytes(32))
ROOT = b"r" * 32
UID = uuid4()


def run(database: Any, sql: str, **values: Any) -> Any:
    def act(connection: Connection) -> list[Any]:
        result = connection.execute(text(sql), values)
        return [tuple(row) for row in result] if result.returns_rows else []

    return in_transaction(database.owner, act)


async def fill(database: Any) -> None:
    """A tenant as the version before made it."""
    migrations.upgrade(database.owner, "0008")
    run(
        database,
        "INSERT INTO tenants VALUES ('acme', :uid, '', 'active', now(), :wrapped, 1, now(), now(), 1)",
        uid=UID,
        # The version of the context was 1 for every root then; it is the epoch now.
        wrapped=await KEY.wrap(ROOT, root_secret_context(UID, 1)),
    )
    run(database, "INSERT INTO salt_policies VALUES ('acme', 'tenant', 1, now(), 1)")


async def test_a_tenants_root_becomes_that_of_its_first_epoch_and_goes_back(postgres: Any) -> None:
    with postgres.fresh_database() as database:
        await fill(database)
        migrations.upgrade(database.owner, "0009")

        [(epoch, wrapped, until)] = run(database, "SELECT epoch, wrapped_root_secret, read_until_time FROM salt_epochs")
        assert (epoch, until) == (1, None)
        assert await KEY.unwrap(wrapped, root_secret_context(UID, 1)) == ROOT
        schedule = "SELECT rotation_period_s, grace_period_s, next_rotation_time FROM salt_policies"
        assert run(database, schedule) == [(0, 86400, None)]

        migrations.downgrade(database.owner, "0008")
        assert run(database, "SELECT wrapped_root_secret FROM tenants") == [(wrapped,)]
        migrations.upgrade(database.owner, "0009")
        assert run(database, "SELECT wrapped_root_secret FROM salt_epochs") == [(wrapped,)]


@pytest.mark.parametrize(
    "change",
    [
        "INSERT INTO salt_epochs VALUES ('acme', 2, '', now(), now())",
        "UPDATE salt_policies SET scope = 'user'",
        "UPDATE salt_policies SET rotation_period_s = 3600, next_rotation_time = now()",
    ],
)
async def test_a_downgrade_undoes_no_rotation_and_widens_no_salt(postgres: Any, change: str) -> None:
    with postgres.fresh_database() as database:
        await fill(database)
        migrations.upgrade(database.owner, "0009")
        run(database, change)

        with pytest.raises(FailedPreconditionError) as caught:
            migrations.downgrade(database.owner, "0008")

        assert caught.value.reason == "SCHEMA_IN_USE"
        assert migrations.current_revision(database.owner) == "0009"


async def test_the_database_itself_holds_one_current_epoch_and_whole_schedules(postgres: Any) -> None:
    with postgres.fresh_database() as database:
        await fill(database)
        migrations.upgrade(database.owner, "0009")
        for refused, rule in (
            ("INSERT INTO salt_epochs VALUES ('acme', 2, '', now(), NULL)", "ix_salt_epochs_current"),
            ("INSERT INTO salt_epochs VALUES ('acme', 0, '', now(), now())", "epoch_from_one"),
            ("UPDATE salt_policies SET rotation_period_s = 3600", "schedule_whole"),
            ("UPDATE salt_policies SET next_rotation_time = now()", "schedule_whole"),
            ("UPDATE salt_policies SET grace_period_s = -1", "grace_period_s_range"),
        ):
            with pytest.raises(Exception, match=rule):
                run(database, refused)
