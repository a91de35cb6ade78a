"""The one-time bootstrap token: one winner, one use, and no trace where it could be read."""

from __future__ import annotations

import asyncio
import stat

import grpc
from sqlalchemy import update

from controlplane.auth.bootstrap import ensure_bootstrap
from controlplane.db import models
from saltern.admin.v1 import credentials_pb2
from saltern.auth.v1 import auth_pb2
from saltern.errors import AlreadyExistsError, UnauthenticatedError
from tests.support.control import Control, refused


def redeem_request(token: str, api_key_id: str = "") -> auth_pb2.RedeemBootstrapTokenRequest:
    return auth_pb2.RedeemBootstrapTokenRequest(bootstrap_token=token, api_key_id=api_key_id)


async def test_exactly_one_of_many_redemptions_wins(fresh: Control) -> None:
    token = fresh.bootstrap_token()
    results = await asyncio.gather(
        *(fresh.auth.RedeemBootstrapToken(redeem_request(token, f"admin-{n}")) for n in range(16)),
        return_exceptions=True,
    )
    winners = [result for result in results if isinstance(result, auth_pb2.RedeemBootstrapTokenResponse)]
    losers = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
    assert (len(winners), len(losers)) == (1, 15)
    assert {loser.code() for loser in losers} == {grpc.StatusCode.UNAUTHENTICATED}
    assert (await fresh.exchange(winners[0].secret)).access_token


async def test_i11_the_redemption_is_audited_and_so_are_attempts(control: Control) -> None:
    await refused(control.auth.RedeemBootstrapToken(redeem_request("bootstrap-saltern-" + "A" * 43)))
    denied, redeemed = [event for event in await control.events() if "Redeem" in event.method]
    assert (redeemed.actor, redeemed.resource, redeemed.outcome) == ("bootstrap", "apiKeys/bootstrap-admin", 1)
    assert (denied.actor, denied.reason, denied.outcome) == ("anonymous", "BOOTSTRAP_TOKEN_INVALID", 2)


async def test_the_file_is_private_and_goes_when_the_token_is_spent(fresh: Control) -> None:
    path = fresh.state_dir / "bootstrap-token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    token = fresh.bootstrap_token()
    await fresh.redeem()
    assert not path.exists()
    spent = await refused(fresh.auth.RedeemBootstrapToken(redeem_request(token)))
    wrong = await refused(fresh.auth.RedeemBootstrapToken(redeem_request("bootstrap-saltern-" + "A" * 43)))
    assert type(spent) is UnauthenticatedError
    assert vars(spent) == vars(wrong)
    assert not await ensure_bootstrap(fresh.database, fresh.state_dir)
    assert not path.exists()


async def test_a_taken_key_id_leaves_the_token_good(fresh: Control) -> None:
    token = fresh.bootstrap_token()
    first = await fresh.redeem()
    # As if a key of that id had been there before the redemption.
    async with fresh.database.transaction() as session:
        await session.execute(update(models.Bootstrap).values(redeemed_time=None))
    error = await refused(fresh.auth.RedeemBootstrapToken(redeem_request(token)))
    assert type(error) is AlreadyExistsError
    other = await fresh.auth.RedeemBootstrapToken(redeem_request(token, "second-admin"))
    assert other.api_key_name == "apiKeys/second-admin"
    assert other.secret != first


async def test_a_malformed_token_is_refused(fresh: Control) -> None:
    for token in ("", "x", "\x00", "bootstrap-saltern-", "ü" * 10_000):
        assert type(await refused(fresh.auth.RedeemBootstrapToken(redeem_request(token)))) is UnauthenticatedError
    assert await fresh.redeem()


async def test_the_first_key_administers_the_platform(control: Control) -> None:
    secret = await control.add_api_key(credentials_pb2.ROLE_PLATFORM_ADMIN, key_id="another")
    assert (await control.exchange(secret)).tenant_id == ""
