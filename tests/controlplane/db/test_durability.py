"""A database that may forget what it has answered is refused at the start (I11)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controlplane.db import connect
from controlplane.db.durability import require_durable_commits
from controlplane.server import running
from saltern.errors import FailedPreconditionError
from tests.support.control import migrate, settings_for


async def _refusal(url: Any) -> FailedPreconditionError | None:
    database = connect(url)
    try:
        await require_durable_commits(database)
    except FailedPreconditionError as error:
        return error
    finally:
        await database.close()
    return None


@pytest.mark.parametrize("setting", ["on", "local", "remote_write", "remote_apply"])
async def test_whatever_waits_for_the_disk_is_taken(postgres: Any, setting: str) -> None:
    with postgres.fresh_database(migrate) as urls, postgres.server.connect("superuser", urls.name) as superuser:
        superuser.execute(f"ALTER DATABASE {urls.name} SET synchronous_commit = {setting}")
        assert await _refusal(urls.app) is None


async def test_i11_a_database_that_answers_before_it_has_written_is_refused_in_words(
    postgres: Any, reachable_tmp_path: Path
) -> None:
    with postgres.fresh_database(migrate) as urls, postgres.server.connect("superuser", urls.name) as superuser:
        superuser.execute(f"ALTER DATABASE {urls.name} SET synchronous_commit = off")
        error = await _refusal(urls.app)
        assert error is not None and (error.reason, error.metadata) == (
            "DATABASE_NOT_DURABLE",
            {"setting": "synchronous_commit"},
        )
        assert "I11" in error.message and "RESET synchronous_commit" in error.hint
        with pytest.raises(FailedPreconditionError) as refused:
            async with running(settings_for(urls, reachable_tmp_path)):
                pass
        assert refused.value.reason == "DATABASE_NOT_DURABLE"
