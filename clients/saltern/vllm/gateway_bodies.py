"""What the gateway does to a request's body: reads it so that no parser could read it otherwise, and writes it anew.

What comes out is written anew from what was read, so nothing that two parsers understand differently reaches vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from saltern.errors import InvalidArgumentError
from saltern.keys import SaltKey
from saltern.vllm.cache_salts import media_id
from saltern.vllm.token_seal import TOKEN_FIELD

#: What callers may not say themselves: transfers of KV and of encoder outputs name memory of other engines.
_TRANSFER_FIELDS: Final = ("kv_transfer_params", "ec_transfer_params")


def parse_body(raw: bytes) -> dict[str, Any]:
    """Parse a body.

    Raises:
        InvalidArgumentError: BODY_MALFORMED: it is not one JSON object in UTF-8, a name stands in an object twice, or
            a number is not finite.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) != len(pairs):
            raise ValueError("duplicate name")
        return names

    def no_constant(name: str) -> NoReturn:
        raise ValueError(name)

    try:
        # Decoded here: of bytes, json would also take UTF-16, UTF-32 and a byte order mark.
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError):
        raise _malformed("is not JSON in UTF-8 with unique names and finite numbers") from None
    if not isinstance(parsed, dict):
        raise _malformed("is not a JSON object")
    return parsed


def rewrite_body(
    body: dict[str, Any], *, cache_salt: str, sealed_token: str, salt_key: SaltKey, refused_fields: Mapping[str, str]
) -> bytes:
    """The body that vLLM gets: with our salt and token, whatever the caller's said.

    Args:
        body: parsed; it is changed.
        cache_salt: of the verified caller.
        sealed_token: of the verified caller, or empty for one without remote cache.
        salt_key: keeps the caller's ids of images, audio and videos apart from everybody else's.
        refused_fields: names that may not be there, with what to do instead.

    Raises:
        InvalidArgumentError: FIELD_NOT_ALLOWED, BODY_MALFORMED.
    """
    for name, hint in refused_fields.items():
        if body.get(name) not in (None, False):
            raise InvalidArgumentError(
                f"the field {name!r} reaches beyond the caller's own cache, and the gateway refuses it",
                reason="FIELD_NOT_ALLOWED",
                hint=hint,
                metadata={"field": name},
            )
    for name in _TRANSFER_FIELDS:
        body.pop(name, None)
    extra = body.get("vllm_xargs")
    if isinstance(extra, dict):  # vLLM reads transfers from here, too
        for name in _TRANSFER_FIELDS:
            extra.pop(name, None)
    try:
        _rename_media(body, salt_key)
    except RecursionError:
        raise _malformed("is nested too deep") from None
    body["cache_salt"] = cache_salt
    if sealed_token:
        body["kv_transfer_params"] = {TOKEN_FIELD: sealed_token}
    return json.dumps(body, separators=(",", ":")).encode("ascii")


def _rename_media(value: object, salt_key: SaltKey) -> None:
    """Put ids of media under the caller's salt: vLLM answers for an id that it has cached without the media itself."""
    match value:
        case dict():
            content = value.get("content")
            if isinstance(content, list):
                for part in content:
                    if isinstance(part, dict) and part.get("uuid") is not None:
                        part["uuid"] = media_id(salt_key, json.dumps(part["uuid"]))
            for member in value.values():
                _rename_media(member, salt_key)
        case list():
            for member in value:
                _rename_media(member, salt_key)


def _malformed(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the request's body {what}", reason="BODY_MALFORMED", hint="send one JSON object, each name once"
    )
