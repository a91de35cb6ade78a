"""The public key set as nodes and clients receive it: the shape of a JWK set (RFC 7517, RFC 8037)."""

from __future__ import annotations

from saltern.auth.v1 import auth_pb2
from tenants.tokens import KeySet, public_key_to_x


def encode_key_set(key_set: KeySet) -> auth_pb2.KeySet:
    """Encode for the wire; ``tenants.tokens.public_key_from_x`` reads ``x`` back."""
    return auth_pb2.KeySet(
        issuer=key_set.issuer,
        keys=[
            auth_pb2.JsonWebKey(kid=kid, kty="OKP", crv="Ed25519", x=public_key_to_x(key), alg="EdDSA", use="sig")
            for kid, key in sorted(key_set.keys.items())
        ],
    )
