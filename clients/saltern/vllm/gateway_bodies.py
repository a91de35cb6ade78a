"""What the gateway does to a request's body: reads it so that no parser could read it otherwise, and writes it anew.

What comes out is written anew from what was read, so nothing that two parsers understand differently reaches vLLM.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from saltern.errors import InvalidArgumentError
from saltern.keys import SaltKey
from saltern.vllm.cache_salts import media_id
from saltern.vllm.token_seal import TOKEN_FIELD

#: What callers may not say themselves: transfers of KV and of encoder outputs name memory of other engines.
_TRANSFER_FIELDS: Final = ("kv_transfer_params", "ec_transfer_params")
#: What a part of a message with media has beside its ``uuid``, by vLLM's ``renderers/chat_utils.py``.
MEDIA_FIELDS: Final = frozenset(
    {
        *("image_url", "input_image", "image_pil", "image_embeds"),
        *("audio_url", "input_audio", "audio_embeds"),
        *("video_url", "video_embeds"),
        "prompt_embeds",
    }
)


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

    def finite(digits: str) -> float:
        number = float(digits)
        if math.isinf(number):  # 1e999 would be written anew as Infinity, which is no JSON
            raise ValueError(digits)
        return number

    try:
        # Decoded here: of bytes, json would also take UTF-16, UTF-32 and a byte order mark.
        parsed = json.loads(
            raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant, parse_float=finite
        )
    except (ValueError, RecursionError):
        raise _malformed("is not JSON in UTF-8 with unique names and finite numbers") from None
    if not isinstance(parsed, dict):
        raise _malformed("is not a JSON object")
    return parsed


def set_fields(body: dict[str, Any], *, cache_salt: str, sealed_token: str, refused_fields: Mapping[str, str]) -> None:
    """Put our salt and token into a body, whatever the caller's said.

    Args:
        body: parsed; it is changed.
        cache_salt: of the verified caller.
        sealed_token: of the verified caller, or empty for one without remote cache.
        refused_fields: names that may not be there, with what to do instead.

    Raises:
        InvalidArgumentError: FIELD_NOT_ALLOWED.
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
    body["cache_salt"] = cache_salt
    if sealed_token:
        body["kv_transfer_params"] = {TOKEN_FIELD: sealed_token}


def write_body(body: dict[str, Any]) -> bytes:
    """A body as vLLM gets it."""
    return json.dumps(body, separators=(",", ":")).encode("ascii")


def rename_media(body: dict[str, Any], salt_key: SaltKey) -> None:
    """Put ids of media under the caller's salt (I2): vLLM takes an id for the name of what is in its caches.

    So who may choose it freely gets for a bare id what another sent with it, and puts a picture of their own where vLLM
    looks for another's. Parts of a message stand in lists of several names (``content``, ``output`` of a tool), so the
    part tells, not where it stands.

    Raises:
        InvalidArgumentError: BODY_MALFORMED.
    """
    try:
        _rename_below(body, salt_key, is_content=False)
    except RecursionError:
        raise _malformed("is nested too deep") from None


def _rename_below(value: object, salt_key: SaltKey, *, is_content: bool) -> None:
    match value:
        case dict():
            for name, member in value.items():
                _rename_below(member, salt_key, is_content=name == "content")
        case list():
            for part in value:
                _rename_below(part, salt_key, is_content=False)
                if (
                    isinstance(part, dict)
                    and part.get("uuid") is not None
                    and (is_content or MEDIA_FIELDS & part.keys())
                ):
                    part["uuid"] = media_id(salt_key, json.dumps(part["uuid"]))


def _malformed(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the request's body {what}", reason="BODY_MALFORMED", hint="send one JSON object, each name once"
    )
