"""Secrets at rest: wrapping under key-encryption keys, and API keys of which only a hash is kept."""

from controlplane.secrets.api_keys import IssuedApiKey, api_key_matches, issue_api_key, parse_api_key
from controlplane.secrets.keyring import Keyring
from controlplane.secrets.local_keys import load_key_encryption_key
from controlplane.secrets.wrapping import (
    KeyEncryptionKey,
    LocalKeyEncryptionKey,
    WrapContext,
    group_root_context,
    root_secret_context,
    signing_key_context,
)

__all__ = [
    "IssuedApiKey",
    "KeyEncryptionKey",
    "Keyring",
    "LocalKeyEncryptionKey",
    "WrapContext",
    "api_key_matches",
    "issue_api_key",
    "load_key_encryption_key",
    "parse_api_key",
    "group_root_context",
    "root_secret_context",
    "signing_key_context",
]
