"""Sharing groups of a tenant: what it shares with whom; invitations accepted or declined; groups left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import Response

from controlplane.console.views.sharing import group_views
from controlplane.console.visit import Visit, page
from saltern.admin.v1.sharing_groups_pb2 import (
    AcceptInvitationRequest,
    DeclineInvitationRequest,
    GetSharingGroupRequest,
    LeaveSharingGroupRequest,
    ListSharingGroupsRequest,
    SharingGroup,
)
from saltern.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class _Act:
    """What a member may do by itself: the method, its request, and what the page says after it."""

    method: str
    request: Any
    done: str


_ACTS: Final[Mapping[str, _Act]] = {
    "accept": _Act("AcceptInvitation", AcceptInvitationRequest, "invitation-accepted"),
    "decline": _Act("DeclineInvitation", DeclineInvitationRequest, "invitation-declined"),
    "leave": _Act("LeaveSharingGroup", LeaveSharingGroupRequest, "group-left"),
}


@page
async def list_groups(visit: Visit) -> Response:
    assert visit.tenant is not None, "the route names a tenant"
    groups = await visit.calls.list(
        visit.services.sharing_groups.ListSharingGroups, ListSharingGroupsRequest(parent=visit.parent), "sharing_groups"
    )
    return visit.render("sharing.html", "Sharing groups", groups=group_views(groups, visit.tenant))


@page
async def ask(visit: Visit) -> Response:
    """What an act does, before it is done."""
    assert visit.tenant is not None, "the route names a tenant"
    _act(visit)
    request = GetSharingGroupRequest(name=_name(visit), member=visit.parent)
    group: SharingGroup = await visit.calls(visit.services.sharing_groups.GetSharingGroup, request)
    view = group_views([group], visit.tenant)[0]
    return visit.render(
        "sharing_ask.html",
        "Sharing group",
        group=view,
        act=visit.path("act"),
        namespace=visit.query.get("namespace", ""),
    )


@page
async def do(visit: Visit) -> Response:
    act = _act(visit)
    request = act.request(
        name=_name(visit),
        namespace=f"{visit.parent}/namespaces/{visit.form.get('namespace', '')}",
        request_id=visit.request_id,
    )
    await visit.calls(getattr(visit.services.sharing_groups, act.method), request)
    return visit.redirect(f"{visit.base}/sharing", act.done)


def _act(visit: Visit) -> _Act:
    act = _ACTS.get(visit.path("act"))
    if act is None:
        raise InvalidArgumentError(
            "that is nothing to do with a group here", reason="INVALID_FIELD", hint="go back to the list of groups"
        )
    return act


def _name(visit: Visit) -> str:
    return f"tenants/{visit.path('owner')}/sharingGroups/{visit.path('group')}"
