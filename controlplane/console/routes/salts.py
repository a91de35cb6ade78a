"""The salt policy of a tenant, and a new epoch on demand."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from starlette.responses import Response

from controlplane.console.views.salts import salt_view
from controlplane.console.visit import Visit, page
from saltern.admin.v1.salt_policies_pb2 import GetSaltPolicyRequest, RotateSaltRequest, SaltPolicy
from saltern.errors import InvalidArgumentError

#: How a rotation treats the epoch before: as the policy says, or not at all.
_POLICY, _NO_GRACE = "policy", "none"
_GRACES: Final = (_POLICY, _NO_GRACE)


@page
async def show_salts(visit: Visit) -> Response:
    return visit.render("salts.html", "Salts", view=salt_view(await _policy(visit), visit.now))


@page
async def ask_rotate(visit: Visit) -> Response:
    grace = visit.query.get("grace", _POLICY)
    view = salt_view(await _policy(visit), visit.now)
    destroys = grace == _NO_GRACE or not view.grace_s
    return visit.render(
        "salt_rotate.html", "Rotate salt", view=view, grace=grace if grace in _GRACES else _POLICY, destroys=destroys
    )


@page
async def rotate_salt(visit: Visit) -> Response:
    grace = visit.form.get("grace")
    if grace not in _GRACES:
        raise InvalidArgumentError(
            "the form does not say what becomes of the epoch before", reason="INVALID_FIELD", hint="go back and choose"
        )
    request = RotateSaltRequest(
        name=f"{visit.parent}/saltPolicy", etag=visit.form.get("etag", ""), request_id=visit.request_id
    )
    if grace == _NO_GRACE:
        request.grace_period.FromTimedelta(timedelta(0))
    await visit.calls(visit.services.salt_policies.RotateSalt, request)
    return visit.redirect(f"{visit.base}/salts", "salt-rotated")


async def _policy(visit: Visit) -> SaltPolicy:
    request = GetSaltPolicyRequest(name=f"{visit.parent}/saltPolicy")
    policy: SaltPolicy = await visit.calls(visit.services.salt_policies.GetSaltPolicy, request)
    return policy
