"""Salt policies: how narrowly a tenant's blocks are named, and how long each generation of its salt lives.

The policy's scope is a *minimum*: a client may always ask for a narrower salt, never for a wider one (I2). What it has
to name itself (a project, a user, a session) is text that the tenant chooses; two different texts never share a salt.
"""

from __future__ import annotations

import re
from typing import Final

from saltern.errors import FailedPreconditionError, InvalidArgumentError, PermissionDeniedError
from saltern.keys import Narrowing, SaltScope

#: Of an epoch between rotations, in seconds; 0 in a policy means that nothing rotates by itself.
ROTATION_PERIOD_MIN_S: Final = 3600
ROTATION_PERIOD_MAX_S: Final = 400 * 86400
#: How long an epoch may still be read after a newer one has begun, in seconds.
GRACE_PERIOD_MAX_S: Final = 90 * 86400
GRACE_PERIOD_DEFAULT_S: Final = 86400
#: Epochs of one tenant that are readable at a time, the current one among them: each costs every node a partition for
#: each namespace. A rotation past it ends the oldest.
EPOCHS_READABLE_MAX: Final = 8
#: Of the name of a project, a user or a session.
SCOPE_ID_MAX_CHARS: Final = 128

#: Scopes that a policy may ask for; a group's salt belongs to the group, not to one tenant's policy.
POLICY_SCOPES: Final = (
    SaltScope.TENANT,
    SaltScope.NAMESPACE,
    SaltScope.PROJECT,
    SaltScope.USER,
    SaltScope.SESSION,
)
# Visible ASCII: what looks the same is the same, and nothing of it turns or breaks a line of a log.
_SCOPE_ID: Final = re.compile(rf"[!-~]{{1,{SCOPE_ID_MAX_CHARS}}}", re.ASCII)


def parse_scope_id(value: str, field: str) -> str:
    """The name of a project, a user or a session; empty stays empty and means that none was given.

    Raises:
        InvalidArgumentError: INVALID_SCOPE_ID: too long, or with other characters than visible ASCII.
    """
    if value and _SCOPE_ID.fullmatch(value) is None:
        raise InvalidArgumentError(
            f"{field} is not 1 to {SCOPE_ID_MAX_CHARS} visible ASCII characters",
            reason="INVALID_SCOPE_ID",
            hint="name it without spaces; where your own names are others, give a hash of them",
            metadata={"field": field},
        )
    return value


def narrow(asked: Narrowing, *, bound_project: str, bound_user: str, scope: SaltScope) -> Narrowing:
    """What a salt is narrowed to: as asked for, within what the API key is bound to and the policy demands.

    A bound key is narrowed to its project and user whether it asks or not, so that no wider salt is ever given to it.

    Args:
        asked: what the request names.
        bound_project, bound_user: of the API key; empty where it is not bound.
        scope: of the salt policy: the least that has to be named.

    Raises:
        PermissionDeniedError: OUTSIDE_KEY_BINDING: it asks for another project or user than the key is bound to.
        FailedPreconditionError: SALT_SCOPE_REQUIRED: the policy demands what neither the request nor the key names.
    """
    narrowed = Narrowing(
        project=_within(bound_project, asked.project, "project"),
        user=_within(bound_user, asked.user, "user"),
        session=asked.session,
    )
    required = {
        SaltScope.PROJECT: narrowed.project,
        SaltScope.USER: narrowed.user,
        SaltScope.SESSION: narrowed.session,
    }
    if required.get(scope) == "":
        raise FailedPreconditionError(
            f"the tenant's salt policy has the scope {scope.value}, and the request names no {scope.value}",
            reason="SALT_SCOPE_REQUIRED",
            hint=f"give {scope.value}_id with the exchange"
            + ("" if scope is SaltScope.SESSION else f", or use an API key that is bound to a {scope.value}"),
            metadata={"scope": scope.value},
        )
    return narrowed


def _within(bound: str, asked: str, what: str) -> str:
    if bound and asked and asked != bound:
        raise PermissionDeniedError(
            f"the API key is bound to another {what} than the request names",
            reason="OUTSIDE_KEY_BINDING",
            hint=f"leave {what}_id empty, or use an API key of that {what}",
            metadata={"field": f"{what}_id"},
        )
    return bound or asked


def narrow_further(given: Narrowing, asked: Narrowing) -> Narrowing:
    """What the holder of a token may have salts narrowed to: what the token says, and what lies below that.

    Not what lies beside it: a token for session 1 of whoever does not open session 1 of user ann, which is named only
    once a user is.

    Args:
        given: what the token says.
        asked: what the request names.

    Raises:
        PermissionDeniedError: OUTSIDE_TOKEN: it asks for anything else.
    """
    levels = ("project", "user", "session")
    narrowest = max((index for index, level in enumerate(levels) if getattr(given, level)), default=-1)
    for index, level in enumerate(levels):
        wanted = getattr(asked, level)
        if wanted and wanted != getattr(given, level) and index <= narrowest:
            raise PermissionDeniedError(
                f"the token is narrowed already, and not to the {level} that the request names",
                reason="OUTSIDE_TOKEN",
                hint=f"leave {level}_id empty, or ask whoever issued the token for one of that {level}",
                metadata={"field": f"{level}_id"},
            )
    return Narrowing(
        project=given.project or asked.project,
        user=given.user or asked.user,
        session=given.session or asked.session,
    )
