"""Access tokens: one strict profile, signed by the control plane and verified by every door (I1).

A token is a JWT (RFC 7519) in the profile of RFC 9068 with everything optional taken out:

* header exactly ``alg=EdDSA`` (Ed25519, RFC 8037), ``typ=at+jwt`` and a ``kid`` of the local key set; nothing else;
* claims exactly ``iss sub aud iat nbf exp jti tenant namespace role``, each present, each of its type;
* besides them, in a token for nodes whose salts were narrowed and in no other, what they were narrowed to: ``project``,
  ``user``, ``session``, or ``group`` alone (the uid of a sharing group), so that the token opens no wider salt (I2);
* integer times, ``exp - iat`` at most one hour, one audience, no duplicate names, canonical base64url.

PyJWT checks the signature; the rest is checked here, because PyJWT accepts a wrong ``typ``, a missing ``exp``, string
times and duplicate claims. Everything is a pure function of the token, the key set and the time passed in.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from saltern.errors import InvalidArgumentError, SalternError, UnauthenticatedError
from saltern.keys import NOT_NARROWED, Narrowing
from saltern.names import NamespaceId, TenantId, parse_namespace_id, parse_tenant_id
from tenants.roles import PLATFORM_ROLES, Role
from tenants.salts import parse_scope_id

TOKEN_MAX_CHARS = 4096
LIFETIME_MAX_S = 3600
#: How far the issuer's clock may be ahead of the verifier's; expiry gets no leeway.
CLOCK_SKEW_S = 5
_TYPE = "at+jwt"
_ALGORITHM = "EdDSA"
_SHAPE = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]{86}", re.ASCII)
_HEADER_NAMES = frozenset({"alg", "typ", "kid"})
_CLAIM_NAMES = frozenset({"iss", "sub", "aud", "iat", "nbf", "exp", "jti", "tenant", "namespace", "role"})
#: There where the salts that came with the token were narrowed; never empty.
_NARROWING_NAMES = frozenset({"project", "user", "session", "group"})
_INTEGER_CLAIMS = frozenset({"iat", "nbf", "exp"})
_TEXT_MAX_CHARS = 256
_JTI = re.compile(r"[0-9a-f]{32}", re.ASCII)
_GROUP_UID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)


class Audience(StrEnum):
    """What a token is for; a token of one audience is refused by the other."""

    CONTROL = "saltern-control"
    NODE = "saltern-node"


@dataclass(frozen=True, slots=True)
class Claims:
    """What a verified token says.

    Attributes:
        issuer: identifier of the deployment.
        subject: resource name of the API key that was exchanged.
        tenant: the tenant, or None for a platform credential.
        namespace: the one namespace that a node token is for, or None for a control token.
        issued_at_s, expires_at_s: Unix seconds.
        token_id: unique, 32 hexadecimal digits.
        narrowing: of the salts that were given with a node token; nodes need no more than that it is well formed.
        group_uid: of the sharing group whose salts those were; empty for the namespace's own.
        kid: the key that a verified token was signed with; it is in the token's header, not among its claims.
    """

    issuer: str
    subject: str
    audience: Audience
    tenant: TenantId | None
    namespace: NamespaceId | None
    role: Role
    issued_at_s: int
    expires_at_s: int
    token_id: str
    narrowing: Narrowing = NOT_NARROWED
    group_uid: str = ""
    kid: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class KeySet:
    """The public keys that may sign tokens, by ``kid``, and the only issuer they sign for."""

    issuer: str
    keys: Mapping[str, Ed25519PublicKey]


def public_key_to_x(key: Ed25519PublicKey) -> str:
    """The ``x`` member of a JWK (RFC 8037): the raw key in base64url without padding."""
    return _encode_segment(key.public_bytes(Encoding.Raw, PublicFormat.Raw))


def public_key_from_x(x: str) -> Ed25519PublicKey:
    """Parse the ``x`` member of a JWK; raises InvalidArgumentError for anything but 32 canonical bytes."""
    try:
        return Ed25519PublicKey.from_public_bytes(_decode_segment(x))
    except ValueError:
        raise InvalidArgumentError("a published key is not an Ed25519 key", reason="INVALID_KEY") from None


def sign_token(key: Ed25519PrivateKey, kid: str, claims: Claims) -> str:
    """Sign ``claims``; ``nbf`` equals ``iat``."""
    header = {"alg": _ALGORITHM, "kid": kid, "typ": _TYPE}
    body = {
        "iss": claims.issuer,
        "sub": claims.subject,
        "aud": claims.audience.value,
        "iat": claims.issued_at_s,
        "nbf": claims.issued_at_s,
        "exp": claims.expires_at_s,
        "jti": claims.token_id,
        "tenant": claims.tenant or "",
        "namespace": claims.namespace or "",
        "role": claims.role.value,
    }
    narrowing = claims.narrowing
    narrowed = {
        "project": narrowing.project,
        "user": narrowing.user,
        "session": narrowing.session,
        "group": claims.group_uid,
    }
    body |= {name: value for name, value in narrowed.items() if value}
    signed = ".".join(_encode_segment(msgspec.json.encode(part)) for part in (header, body))
    return f"{signed}.{_encode_segment(key.sign(signed.encode()))}"


def verify_token(token: str, key_set: KeySet, *, audience: Audience, now_s: int) -> Claims:
    """Verify a token and return what it says.

    Args:
        token: the compact form.
        key_set: keys and issuer to trust; nothing in the token can add to it.
        audience: the only audience accepted.
        now_s: Unix seconds.

    Raises:
        UnauthenticatedError: with a reason TOKEN_MALFORMED, TOKEN_ALGORITHM, TOKEN_TYPE, TOKEN_UNKNOWN_KEY,
            TOKEN_SIGNATURE, TOKEN_CLAIMS, TOKEN_ISSUER, TOKEN_AUDIENCE, TOKEN_NOT_YET_VALID or TOKEN_EXPIRED. No part
            of the token is in the message.
    """
    if not isinstance(token, str) or len(token) > TOKEN_MAX_CHARS or _SHAPE.fullmatch(token) is None:
        _refuse("TOKEN_MALFORMED", "the token is not a compact JWT signed with Ed25519")
    header_segment, claims_segment, signature_segment = token.split(".")
    header = _parse_object(header_segment)
    if header.get("alg") != _ALGORITHM:
        _refuse("TOKEN_ALGORITHM", "the token's algorithm is not EdDSA")
    if header.get("typ") != _TYPE:
        _refuse("TOKEN_TYPE", f"the token's type is not {_TYPE}")
    if header.keys() != _HEADER_NAMES:
        _refuse("TOKEN_MALFORMED", "the token's header has members besides alg, typ and kid")
    kid = header["kid"]
    key = key_set.keys.get(kid) if isinstance(kid, str) else None
    if key is None:
        _refuse("TOKEN_UNKNOWN_KEY", "the token is signed with a key that is not in the current key set")
    _segment_bytes(signature_segment)
    try:
        jwt.PyJWS().decode(token, key, algorithms=[_ALGORITHM])
    except jwt.PyJWTError:
        _refuse("TOKEN_SIGNATURE", "the token's signature does not verify")
    return _check_claims(_parse_object(claims_segment), kid, key_set.issuer, audience, now_s)


def _check_claims(claims: dict[str, Any], kid: str, issuer: str, audience: Audience, now_s: int) -> Claims:
    if claims.keys() - _NARROWING_NAMES != _CLAIM_NAMES:
        names = sorted((claims.keys() - _NARROWING_NAMES) ^ _CLAIM_NAMES)[:4]
        _refuse(
            "TOKEN_CLAIMS", f"the token's claims are not the required ones: see {', '.join(map(repr, names))[:200]}"
        )
    for name, value in claims.items():
        if name in _INTEGER_CLAIMS:
            if type(value) is not int or not 0 <= value < 2**40:
                _refuse("TOKEN_CLAIMS", f"the token's claim {name} is not an integer time")
        elif not isinstance(value, str) or len(value) > _TEXT_MAX_CHARS:
            _refuse("TOKEN_CLAIMS", f"the token's claim {name} is not a short string")
    if claims["iss"] != issuer:
        _refuse("TOKEN_ISSUER", "the token is from another issuer")
    if claims["aud"] != audience.value:
        _refuse("TOKEN_AUDIENCE", f"the token is not for {audience.value}")
    issued_at_s, expires_at_s = claims["iat"], claims["exp"]
    if not issued_at_s <= claims["nbf"] < expires_at_s <= issued_at_s + LIFETIME_MAX_S:
        _refuse("TOKEN_CLAIMS", f"the token's times are out of order or more than {LIFETIME_MAX_S} s apart")
    if now_s >= expires_at_s:
        _refuse("TOKEN_EXPIRED", f"the token expired {now_s - expires_at_s} s ago")
    if max(issued_at_s, claims["nbf"]) > now_s + CLOCK_SKEW_S:
        _refuse("TOKEN_NOT_YET_VALID", "the token is not valid yet", hint="compare the clocks of issuer and verifier")
    if not claims["sub"] or _JTI.fullmatch(claims["jti"]) is None:
        _refuse("TOKEN_CLAIMS", "the token's sub or jti is not well formed")
    try:
        role = Role(claims["role"])
        tenant = parse_tenant_id(claims["tenant"]) if claims["tenant"] else None
        namespace = parse_namespace_id(claims["namespace"]) if claims["namespace"] else None
    except (ValueError, SalternError):
        _refuse("TOKEN_CLAIMS", "the token's role, tenant or namespace is not well formed")
    if (tenant is None) != (role in PLATFORM_ROLES):
        _refuse("TOKEN_CLAIMS", "the token's role and tenant do not go together")
    if audience is Audience.NODE and (tenant is None or namespace is None):
        _refuse("TOKEN_CLAIMS", "a token for a node names no tenant and namespace")
    narrowing, group_uid = _check_narrowing(claims, audience)
    return Claims(
        issuer=issuer,
        subject=claims["sub"],
        audience=audience,
        tenant=tenant,
        namespace=namespace,
        role=role,
        issued_at_s=issued_at_s,
        expires_at_s=expires_at_s,
        token_id=claims["jti"],
        narrowing=narrowing,
        group_uid=group_uid,
        kid=kid,
    )


def _check_narrowing(claims: dict[str, Any], audience: Audience) -> tuple[Narrowing, str]:
    """What the salts of the token were narrowed to, and the uid of their sharing group."""
    named = {name: claims[name] for name in _NARROWING_NAMES & claims.keys()}
    if not named:
        return NOT_NARROWED, ""
    if audience is not Audience.NODE:
        _refuse("TOKEN_CLAIMS", "only a token for nodes comes with salts that are narrowed")
    group_uid = named.pop("group", None)
    try:
        ids = {name: parse_scope_id(value, name) for name, value in named.items()}
    except SalternError:
        _refuse("TOKEN_CLAIMS", "the token's project, user or session is not well formed")
    if "" in ids.values() or (group_uid is not None and (ids or _GROUP_UID.fullmatch(group_uid) is None)):
        _refuse("TOKEN_CLAIMS", "the token's project, user, session or group is empty, or they do not go together")
    return Narrowing(**ids), group_uid or ""


def _refuse(reason: str, message: str, hint: str = "exchange the API key for a new token") -> NoReturn:
    raise UnauthenticatedError(message, reason=reason, hint=hint) from None


def _parse_object(segment: str) -> dict[str, Any]:
    """Decode one base64url JSON object; duplicate names and non-finite numbers are refused."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) != len(pairs):
            raise ValueError("duplicate name")
        return names

    def no_constant(name: str) -> NoReturn:
        raise ValueError(name)

    try:
        # Decoded here: of bytes, json would also take UTF-16, UTF-32 and a byte order mark.
        text = _segment_bytes(segment).decode("utf-8")
        parsed = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError):
        _refuse("TOKEN_MALFORMED", "a part of the token is not one JSON object with unique names")
    if not isinstance(parsed, dict):
        _refuse("TOKEN_MALFORMED", "a part of the token is not a JSON object")
    return parsed


def _segment_bytes(segment: str) -> bytes:
    try:
        return _decode_segment(segment)
    except ValueError:
        _refuse("TOKEN_MALFORMED", "a part of the token is not canonical base64url")


def _decode_segment(segment: str) -> bytes:
    """Decode base64url without padding; raises ValueError unless encoding gives back the same text."""
    raw = base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4))
    if _encode_segment(raw) != segment:
        raise ValueError("not canonical base64url")
    return raw


def _encode_segment(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")
