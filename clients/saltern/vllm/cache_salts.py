"""From a salt key to the ``cache_salt`` of vLLM's own prefix cache: one way, so that it may be published.

vLLM hashes the salt into the first block of a prompt, hands it to whoever listens to KV events, and logs it. So it must
be the same for those who share a salt key, another for everybody else, and say nothing about the key itself::

    cache_salt = base64url(HMAC-SHA256(salt_key, frame("saltern/vllm/cache-salt/1", tenant, namespace)))

Members of a sharing group have one salt key, so the group's uid stands there instead of tenant and namespace.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import NewType

from saltern.grant import Grant
from saltern.keys import SaltKey, frame

CacheSalt = NewType("CacheSalt", str)  #: 43 characters; vLLM takes 128, without ``@``, ``/`` and backslash

_SALT_LABEL = "saltern/vllm/cache-salt/1"
_MEDIA_LABEL = "saltern/vllm/media-id/1"


def cache_salts(grant: Grant) -> tuple[CacheSalt, ...]:
    """The salts of a grant's readable epochs, the current one last."""
    owner = (grant.sharing_group_uid,) if grant.sharing_group_uid else (grant.tenant, grant.namespace)
    return tuple(CacheSalt(_derive(salt.key, _SALT_LABEL, *owner)) for salt in grant.salts)


def media_id(salt_key: SaltKey, given: str) -> str:
    """The id under which vLLM may cache a caller's image, audio or video: nobody of another salt can name it."""
    return _derive(salt_key, _MEDIA_LABEL, given)


def _derive(salt_key: SaltKey, *parts: str) -> str:
    digest = hmac.new(salt_key, frame(*parts), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")
