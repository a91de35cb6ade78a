"""One table of bad tokens for every door that takes one: control plane, wire protocol, CacheService, SDK.

Each row is off the strict profile of :mod:`tenants.tokens` by exactly one thing, so the reason says which check caught
it. Every token is printable ASCII without spaces: any door can carry it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tenants.tokens import LIFETIME_MAX_S, TOKEN_MAX_CHARS, Audience

_JTI = "0123456789abcdef" * 2
_GROUP_UID = "0b0e7a52-3d4f-4a6b-8c9d-0e1f2a3b4c5d"


class BadToken(NamedTuple):
    name: str
    token: str
    expected_reason: str


def base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def sign_raw(key: Ed25519PrivateKey, header: dict[str, Any] | str, claims: dict[str, Any] | str) -> str:
    """Sign whatever is given (text is taken as the raw JSON) into a compact JWT: a signer without any rules."""
    parts = (part if isinstance(part, str) else json.dumps(part) for part in (header, claims))
    signed = ".".join(base64url(part.encode()) for part in parts)
    return f"{signed}.{base64url(key.sign(signed.encode()))}"


def good_header(kid: str) -> dict[str, Any]:
    return {"alg": "EdDSA", "typ": "at+jwt", "kid": kid}


def good_claims(
    *,
    issuer: str,
    now_s: int,
    audience: Audience,
    tenant: str = "acme",
    namespace: str = "chat",
    role: str = "",
    subject: str = "tenants/acme/apiKeys/key",
) -> dict[str, Any]:
    """Claims that verify; a token for the control plane names no namespace."""
    return {
        "iss": issuer,
        "sub": subject,
        "aud": audience.value,
        "iat": now_s,
        "nbf": now_s,
        "exp": now_s + 600,
        "jti": _JTI,
        "tenant": tenant,
        "namespace": namespace if audience is Audience.NODE else "",
        "role": role or ("writer" if audience is Audience.NODE else "tenant-admin"),
    }


def leaked(table: list[BadToken], text: str) -> list[str]:
    """Names of the rows of which ``text``, such as a log, holds the token or one of its long parts."""
    return [
        row.name
        for row in table
        if any(len(part) > 40 and part in text for part in (row.token, *row.token.split(".")))  # not short names
    ]


def bad_tokens(
    signing_key: Ed25519PrivateKey,
    other_key: Ed25519PrivateKey,
    kid: str,
    issuer: str,
    now_s: int,
    audience: Audience,
    tenant: str = "acme",
    namespace: str = "chat",
    subject: str = "tenants/acme/apiKeys/key",
) -> list[BadToken]:
    """The table.

    Args:
        signing_key: the deployment's own key, published under ``kid``.
        other_key: a key that the deployment does not know.
        now_s: the verifier's Unix time.
        audience: what the door under test accepts.
        tenant, namespace, subject: what a good token would name.
    """
    header = good_header(kid)
    claims = good_claims(
        issuer=issuer, now_s=now_s, audience=audience, tenant=tenant, namespace=namespace, subject=subject
    )
    good = sign_raw(signing_key, header, claims)
    head, body, signature = good.split(".")
    other_audience = Audience.NODE if audience is Audience.CONTROL else Audience.CONTROL
    forged_body = base64url(json.dumps(claims | {"tenant": "victim"}).encode())
    # The classic confusion: the public key, which everyone knows, used as an HMAC secret.
    public = signing_key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    confused = f"{base64url(json.dumps(header | {'alg': 'HS256'}).encode())}.{body}"
    hmac_padded = hmac.new(public, confused.encode(), hashlib.sha512).digest()

    def with_header(**changes: Any) -> str:
        return sign_raw(signing_key, header | changes, claims)

    def with_claims(**changes: Any) -> str:
        return sign_raw(signing_key, header, claims | changes)

    def without(name: str) -> str:
        return sign_raw(signing_key, header, {key: value for key, value in claims.items() if key != name})

    duplicate_claim = json.dumps(claims)[:-1] + ', "tenant": "victim"}'
    duplicate_header = json.dumps(header)[:-1] + f', "kid": "{kid}"}}'
    # The last of 86 base64url characters carries 4 bits that decode to nothing: another spelling of the same bytes.
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    respelled = alphabet[alphabet.index(signature[-1]) ^ 1]
    # RFC 8032 demands S < L: without that check S + L is a second signature of the same message.
    low_order = 2**252 + 27742317777372353535851937790883648493
    raw_signature = key_bytes(signature)
    s_plus_order = (int.from_bytes(raw_signature[32:], "little") + low_order).to_bytes(32, "little")
    malleable = base64url(raw_signature[:32] + s_plus_order)
    signed_utf16 = f"{head}.{base64url(json.dumps(claims).encode('utf-16-le'))}"
    homoglyph = chr(ord(tenant[0]) - ord("a") + ord("\N{FULLWIDTH LATIN SMALL LETTER A}")) + tenant[1:]
    spaced_head = base64url(json.dumps(header, indent=1).encode())
    rows = [
        # not a token of this kind
        ("one word", "garbage", "TOKEN_MALFORMED"),
        ("two parts", f"{head}.{body}", "TOKEN_MALFORMED"),
        ("four parts", f"{good}.AAAA", "TOKEN_MALFORMED"),
        ("empty signature", f"{head}.{body}.", "TOKEN_MALFORMED"),
        ("truncated", good[:-1], "TOKEN_MALFORMED"),
        ("padded base64", f"{good}==", "TOKEN_MALFORMED"),
        ("too long", sign_raw(signing_key, header, claims | {"sub": "s" * TOKEN_MAX_CHARS}), "TOKEN_MALFORMED"),
        ("respelled signature", good[:-1] + respelled, "TOKEN_MALFORMED"),
        ("nothing", "", "TOKEN_MALFORMED"),
        ("dots alone", "..", "TOKEN_MALFORMED"),
        ("no header", f".{body}.{signature}", "TOKEN_MALFORMED"),
        ("no claims", f"{head}..{signature}", "TOKEN_MALFORMED"),
        ("five parts, as an encrypted token", f"{head}.{signature}.{signature}.{body}.{signature}", "TOKEN_MALFORMED"),
        ("unsecured, the empty signature left out", f"{base64url(b'{}')}.{body}", "TOKEN_MALFORMED"),
        ("data after the end", f"{good}AAAA", "TOKEN_MALFORMED"),
        ("a line end after the end", f"{good}%0A", "TOKEN_MALFORMED"),
        ("plain base64 alphabet", f"{head}.{body}.{'+/' * 43}", "TOKEN_MALFORMED"),
        ("claims not JSON", sign_raw(signing_key, header, "{'iss'"), "TOKEN_MALFORMED"),
        ("claims a list", sign_raw(signing_key, header, "[1]"), "TOKEN_MALFORMED"),
        ("claims nested deep", sign_raw(signing_key, header, "[" * 1000 + "]" * 1000), "TOKEN_MALFORMED"),
        ("claims NaN", sign_raw(signing_key, header, json.dumps(claims | {"exp": float("nan")})), "TOKEN_MALFORMED"),
        ("duplicate claim", sign_raw(signing_key, header, duplicate_claim), "TOKEN_MALFORMED"),
        ("duplicate header member", sign_raw(signing_key, duplicate_header, claims), "TOKEN_MALFORMED"),
        ("critical extension", with_header(crit=["exp"]), "TOKEN_MALFORMED"),
        ("key in the header", with_header(jwk={"kty": "OKP", "crv": "Ed25519", "x": "AAAA"}), "TOKEN_MALFORMED"),
        ("certificate address in the header", with_header(x5u="https://example.com/cert"), "TOKEN_MALFORMED"),
        ("certificate in the header", with_header(x5c=["AAAA"]), "TOKEN_MALFORMED"),
        ("content type in the header", with_header(cty="JWT"), "TOKEN_MALFORMED"),
        ("unencoded payload", with_header(b64=False, crit=["b64"]), "TOKEN_MALFORMED"),
        ("compressed", with_header(zip="DEF"), "TOKEN_MALFORMED"),
        ("header a list", sign_raw(signing_key, "[]", claims), "TOKEN_MALFORMED"),
        (
            "claims with a byte order mark",
            sign_raw(signing_key, header, "\ufeff" + json.dumps(claims)),
            "TOKEN_MALFORMED",
        ),
        ("claims in UTF-16", f"{signed_utf16}.{base64url(signing_key.sign(signed_utf16.encode()))}", "TOKEN_MALFORMED"),
        ("claims followed by more", sign_raw(signing_key, header, json.dumps(claims) + "{}"), "TOKEN_MALFORMED"),
        ("key address in the header", with_header(jku="https://example.com/keys"), "TOKEN_MALFORMED"),
        # algorithm and type
        ("algorithm none", with_header(alg="none"), "TOKEN_ALGORITHM"),
        ("algorithm HS256 keyed with the public key", f"{confused}.{base64url(hmac_padded)}", "TOKEN_ALGORITHM"),
        ("algorithm ES256", with_header(alg="ES256"), "TOKEN_ALGORITHM"),
        ("algorithm RS256", with_header(alg="RS256"), "TOKEN_ALGORITHM"),
        ("algorithm PS512", with_header(alg="PS512"), "TOKEN_ALGORITHM"),
        ("algorithm none in capitals", with_header(alg="NONE"), "TOKEN_ALGORITHM"),
        ("algorithm empty", with_header(alg=""), "TOKEN_ALGORITHM"),
        ("algorithm a list", with_header(alg=["EdDSA"]), "TOKEN_ALGORITHM"),
        ("no algorithm", sign_raw(signing_key, {"typ": "at+jwt", "kid": kid}, claims), "TOKEN_ALGORITHM"),
        ("type in capitals", with_header(typ="AT+JWT"), "TOKEN_TYPE"),
        ("type with its prefix", with_header(typ="application/at+jwt"), "TOKEN_TYPE"),
        ("type null", with_header(typ=None), "TOKEN_TYPE"),
        ("algorithm lower case", with_header(alg="eddsa"), "TOKEN_ALGORITHM"),
        ("type JWT", with_header(typ="JWT"), "TOKEN_TYPE"),
        ("no type", sign_raw(signing_key, {"alg": "EdDSA", "kid": kid}, claims), "TOKEN_TYPE"),
        # keys and signatures
        ("unknown key", sign_raw(other_key, good_header("no-such-key"), claims), "TOKEN_UNKNOWN_KEY"),
        ("no key id", sign_raw(signing_key, {"alg": "EdDSA", "typ": "at+jwt"}, claims), "TOKEN_MALFORMED"),
        ("key id empty", with_header(kid=""), "TOKEN_UNKNOWN_KEY"),
        ("key id a path", with_header(kid="../../etc/passwd"), "TOKEN_UNKNOWN_KEY"),
        ("key id SQL", with_header(kid=f"{kid}' OR '1'='1"), "TOKEN_UNKNOWN_KEY"),
        ("key id a list", with_header(kid=[kid]), "TOKEN_UNKNOWN_KEY"),
        ("key id in capitals with a space", with_header(kid=f" {kid.upper()}"), "TOKEN_UNKNOWN_KEY"),
        ("a withdrawn key's", sign_raw(other_key, good_header("0123456789abcdef"), claims), "TOKEN_UNKNOWN_KEY"),
        ("key id not text", with_header(kid=7), "TOKEN_UNKNOWN_KEY"),
        ("signed by another key", sign_raw(other_key, header, claims), "TOKEN_SIGNATURE"),
        ("claims exchanged after signing", f"{head}.{forged_body}.{signature}", "TOKEN_SIGNATURE"),
        ("signature with S + L", f"{head}.{body}.{malleable}", "TOKEN_SIGNATURE"),
        ("signature of the zero key", f"{head}.{body}.{base64url(bytes([1]) + bytes(63))}", "TOKEN_SIGNATURE"),
        ("signature of other claims", f"{head}.{body}.{with_claims(jti='f' * 32).split('.')[2]}", "TOKEN_SIGNATURE"),
        ("header spelled otherwise", f"{spaced_head}.{body}.{signature}", "TOKEN_SIGNATURE"),
        ("signature of zeros", f"{head}.{body}.{'A' * 86}", "TOKEN_SIGNATURE"),
        # claims
        *((f"without {name}", without(name), "TOKEN_CLAIMS") for name in claims),
        ("one claim more", with_claims(scope="admin"), "TOKEN_CLAIMS"),
        ("expiry as text", with_claims(exp=str(now_s + 600)), "TOKEN_CLAIMS"),
        ("expiry as fraction", with_claims(exp=now_s + 600.5), "TOKEN_CLAIMS"),
        ("issue time true", with_claims(iat=True), "TOKEN_CLAIMS"),
        ("negative issue time", with_claims(iat=-1), "TOKEN_CLAIMS"),
        (
            "issue time infinite",
            sign_raw(signing_key, header, json.dumps(claims | {"iat": float("inf")})),
            "TOKEN_MALFORMED",
        ),
        (
            "expiry in exponents",
            sign_raw(signing_key, header, f'{json.dumps(claims)[:-1]}, "exp": 1e10}}'),
            "TOKEN_MALFORMED",
        ),
        ("expiry a float that is whole", with_claims(exp=float(now_s + 600)), "TOKEN_CLAIMS"),
        ("expiry beyond any clock", with_claims(exp=2**64), "TOKEN_CLAIMS"),
        ("begin null", with_claims(nbf=None), "TOKEN_CLAIMS"),
        ("expiry an object", with_claims(exp={"$gt": 0}), "TOKEN_CLAIMS"),
        ("audience nested", with_claims(aud=[[audience.value]]), "TOKEN_CLAIMS"),
        ("audience an object", with_claims(aud={"aud": audience.value}), "TOKEN_CLAIMS"),
        ("issuer a list", with_claims(iss=[issuer]), "TOKEN_CLAIMS"),
        ("role a list", with_claims(role=["writer", "platform-admin"]), "TOKEN_CLAIMS"),
        ("subject a number", with_claims(sub=7), "TOKEN_CLAIMS"),
        ("subject too long", with_claims(sub="s" * 257), "TOKEN_CLAIMS"),
        ("tenant with a letter that looks the same", with_claims(tenant=homoglyph), "TOKEN_CLAIMS"),
        ("tenant in capitals", with_claims(tenant=tenant.upper()), "TOKEN_CLAIMS"),
        ("tenant with a space", with_claims(tenant=f"{tenant} "), "TOKEN_CLAIMS"),
        ("role in capitals", with_claims(role="WRITER"), "TOKEN_CLAIMS"),
        ("token id in capitals", with_claims(jti=_JTI.upper()), "TOKEN_CLAIMS"),
        ("token id with a line end", with_claims(jti=_JTI[:-1] + "\n"), "TOKEN_CLAIMS"),
        ("begins before it was issued", with_claims(nbf=now_s - 1), "TOKEN_CLAIMS"),
        ("ends the moment it begins", with_claims(exp=now_s), "TOKEN_CLAIMS"),
        ("audience a list", with_claims(aud=[audience.value]), "TOKEN_CLAIMS"),
        ("tenant null", with_claims(tenant=None), "TOKEN_CLAIMS"),
        ("tenant not an identifier", with_claims(tenant="../acme"), "TOKEN_CLAIMS"),
        ("tenant with a NUL", with_claims(tenant="acme\x00victim"), "TOKEN_CLAIMS"),
        ("tenant reserved", with_claims(tenant="platform"), "TOKEN_CLAIMS"),
        ("namespace not an identifier", with_claims(namespace="Chat/.."), "TOKEN_CLAIMS"),
        ("unknown role", with_claims(role="root"), "TOKEN_CLAIMS"),
        ("platform role with a tenant", with_claims(role="platform-admin"), "TOKEN_CLAIMS"),
        ("tenant role without a tenant", with_claims(tenant=""), "TOKEN_CLAIMS"),
        ("no subject", with_claims(sub=""), "TOKEN_CLAIMS"),
        ("token id too short", with_claims(jti="abc"), "TOKEN_CLAIMS"),
        ("lives too long", with_claims(exp=now_s + LIFETIME_MAX_S + 1), "TOKEN_CLAIMS"),
        ("ends before it begins", with_claims(exp=now_s - 1), "TOKEN_CLAIMS"),
        # what salts are narrowed to; a token for the control plane comes with none
        *((f"{name} empty", with_claims(**{name: ""}), "TOKEN_CLAIMS") for name in ("project", "user", "session")),
        ("user null", with_claims(user=None), "TOKEN_CLAIMS"),
        ("user a list", with_claims(user=["ann"]), "TOKEN_CLAIMS"),
        ("session a number", with_claims(session=7), "TOKEN_CLAIMS"),
        ("project with a space", with_claims(project="p 1"), "TOKEN_CLAIMS"),
        ("user with a line end", with_claims(user="ann\n"), "TOKEN_CLAIMS"),
        ("user too long", with_claims(user="u" * 129), "TOKEN_CLAIMS"),
        ("user with a letter that looks the same", with_claims(user="\uff41nn"), "TOKEN_CLAIMS"),
        ("group by its name", with_claims(group="tenants/acme/sharingGroups/research"), "TOKEN_CLAIMS"),
        ("group empty", with_claims(group=""), "TOKEN_CLAIMS"),
        ("group and user", with_claims(group=_GROUP_UID, user="ann"), "TOKEN_CLAIMS"),
        ("user in capitals beside", with_claims(User="ann"), "TOKEN_CLAIMS"),
        *(
            (f"narrowed to a {name} for the control plane", with_claims(**{name: value}), "TOKEN_CLAIMS")
            for name, value in (("project", "p-1"), ("user", "ann"), ("session", "s"), ("group", _GROUP_UID))
            if audience is Audience.CONTROL
        ),
        # issuer, audience, time
        ("another issuer", with_claims(iss="saltern-of-somebody-else"), "TOKEN_ISSUER"),
        ("issuer with a slash", with_claims(iss=f"{issuer}/"), "TOKEN_ISSUER"),
        ("audience in capitals", with_claims(aud=audience.value.upper()), "TOKEN_AUDIENCE"),
        ("two audiences in one text", with_claims(aud=f"{audience.value} {other_audience.value}"), "TOKEN_AUDIENCE"),
        ("another audience", with_claims(aud=other_audience.value), "TOKEN_AUDIENCE"),
        ("audience of a stranger", with_claims(aud="example.com"), "TOKEN_AUDIENCE"),
        ("expired", with_claims(iat=now_s - 600, nbf=now_s - 600, exp=now_s - 1), "TOKEN_EXPIRED"),
        ("expires this second", with_claims(iat=now_s - 600, nbf=now_s - 600, exp=now_s), "TOKEN_EXPIRED"),
        ("not yet valid", with_claims(nbf=now_s + 60), "TOKEN_NOT_YET_VALID"),
        ("issued in the future", with_claims(iat=now_s + 60, nbf=now_s + 60, exp=now_s + 660), "TOKEN_NOT_YET_VALID"),
    ]
    return [BadToken(*row) for row in rows]


def key_bytes(segment: str) -> bytes:
    """The bytes of a base64url segment."""
    return base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4))
