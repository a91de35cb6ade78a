"""The consistency token: the policy version that holds a change, which every changing call is answered with.

It is a position in the history of the whole deployment and no secret. ``AdminClient.wait_for_policy`` takes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

#: In the trailing metadata of the answer.
POLICY_VERSION_KEY: Final = "saltern-policy-version"
#: How long ``WaitForPolicy`` waits where nothing is said, and at most.
WAIT_DEFAULT_S: Final = 30.0
WAIT_MAX_S: Final = 900.0
_DIGITS_MAX: Final = 19


def read_policy_version(trailing_metadata: Iterable[tuple[str, str | bytes]] | None) -> int:
    """The token in the trailing metadata of an answer; 0 where it changed nothing, or says nothing."""
    for key, value in trailing_metadata or ():
        if key == POLICY_VERSION_KEY and isinstance(value, str) and value.isdecimal() and len(value) <= _DIGITS_MAX:
            return int(value)
    return 0
