"""The public key set as nodes and clients receive it: the shape of a JWK set (RFC 7517, RFC 8037)."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from google.protobuf.json_format import MessageToDict

from controlplane.core.key_rotation import KeyLife, KeyState
from saltern.admin.v1 import tokens_pb2
from saltern.auth.v1 import auth_pb2
from tenants.tokens import KeySet, public_key_to_x

_STATES = {
    KeyState.PUBLISHED: tokens_pb2.SigningKey.STATE_PUBLISHED,
    KeyState.SIGNING: tokens_pb2.SigningKey.STATE_SIGNING,
    KeyState.RETIRING: tokens_pb2.SigningKey.STATE_RETIRING,
    KeyState.WITHDRAWN: tokens_pb2.SigningKey.STATE_WITHDRAWN,
}


def encode_key_set(key_set: KeySet) -> auth_pb2.KeySet:
    """Encode for the wire; ``tenants.tokens.public_key_from_x`` reads ``x`` back."""
    return auth_pb2.KeySet(
        issuer=key_set.issuer,
        keys=[
            auth_pb2.JsonWebKey(kid=kid, kty="OKP", crv="Ed25519", x=public_key_to_x(key), alg="EdDSA", use="sig")
            for kid, key in sorted(key_set.keys.items())
        ],
    )


def encode_signing_key(life: KeyLife, now: datetime) -> tokens_pb2.SigningKey:
    """A signing key as administrators see it; nothing in it is secret."""
    key = tokens_pb2.SigningKey(kid=life.kid, state=_STATES[life.state(now)], publish_version=life.publish_version)
    for name in ("create_time", "sign_time", "retire_time", "not_after_time"):
        time = getattr(life, name)
        if time is not None:
            getattr(key, name).FromDatetime(time)
    return key


def encode_signing_keys(lives: Iterable[KeyLife], now: datetime) -> list[dict[str, object]]:
    """Signing keys as the audit trail keeps them."""
    return [MessageToDict(encode_signing_key(life, now), preserving_proto_field_name=True) for life in lives]
