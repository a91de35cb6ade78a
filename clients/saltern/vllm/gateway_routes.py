"""Which of vLLM's routes the gateway lets through: an allow-list, read from vLLM 0.32.0 route by route.

A route that carries a prompt is *salted* only where vLLM is known to take ``cache_salt`` from the body all the way to
its prefix cache. Everything that is not named here is refused, what a later vLLM brings as well.

=============================================  ===================================================================
refused                                        because
=============================================  ===================================================================
``/v1/responses/{id}``, its ``cancel``         answers of any tenant are kept under ids alone
``/score``, ``/rerank`` and their versions     one of its processors (Jina ranking) drops the salt
``/v2/embed``, ``/cohere/...``                 their bodies have no ``cache_salt``
``/v1/audio/...``                              forms without ``cache_salt``
``/v1/realtime``                               a WebSocket without ``cache_salt``
``/inference/v1/generate``, ``.../render``     ids of cached media and tokens are taken from the caller
``/invocations``                               what it does is decided by the form of the body
administration, ``/metrics`` apart             weights, adapters, sleep, caches, RPC are not for tenants
=============================================  ===================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final


class Treatment(Enum):
    """What happens to a request of a route."""

    OPEN = auto()  #: passed on, from anybody: it tells nothing of any tenant
    VERIFIED = auto()  #: from verified callers, with their own ids of media: it touches no cache of prompts
    SALTED = auto()  #: from verified callers, with salt and token written into the body


@dataclass(frozen=True, slots=True)
class Route:
    """How a route is treated; ``refused_fields``: names that its body may not have, with what to do instead."""

    treatment: Treatment
    refused_fields: Mapping[str, str] = field(default_factory=dict)


_OPEN: Final = Route(Treatment.OPEN)
_VERIFIED: Final = Route(Treatment.VERIFIED)
_SALTED: Final = Route(Treatment.SALTED)
_NO_STORED_RESPONSES: Final = "send the whole conversation: stored responses are not kept apart by tenant"

ROUTES: Final[Mapping[tuple[str, str], Route]] = {
    ("GET", "/health"): _OPEN,
    ("GET", "/ping"): _OPEN,
    ("GET", "/version"): _OPEN,
    ("GET", "/load"): _OPEN,
    ("GET", "/metrics"): _OPEN,
    ("GET", "/v1/models"): _VERIFIED,
    ("POST", "/tokenize"): _VERIFIED,
    ("POST", "/detokenize"): _VERIFIED,
    ("POST", "/v1/messages/count_tokens"): _VERIFIED,
    ("POST", "/v1/chat/completions"): _SALTED,
    ("POST", "/v1/chat/completions/batch"): _SALTED,
    ("POST", "/v1/completions"): _SALTED,
    ("POST", "/v1/messages"): _SALTED,
    ("POST", "/v1/responses"): Route(
        Treatment.SALTED,
        {"previous_response_id": _NO_STORED_RESPONSES, "background": _NO_STORED_RESPONSES},
    ),
    ("POST", "/v1/embeddings"): _SALTED,
    ("POST", "/classify"): _SALTED,
    ("POST", "/pooling"): Route(Treatment.SALTED, {"data": "plug-ins of vLLM decide themselves what becomes of it"}),
    ("POST", "/v1/systemone"): _SALTED,
    ("POST", "/generative_scoring"): _SALTED,
}
_PATHS: Final = frozenset(path for _, path in ROUTES)


def find_route(scope: Mapping[str, Any]) -> Route | None:
    """The route of a request, or None where it is refused; as exact as vLLM's own router and no more."""
    path = route_path(scope)
    method = scope["method"]
    if method == "OPTIONS" and path in _PATHS:
        return _OPEN  # a browser's question before the request, which holds no credential
    return ROUTES.get(("GET" if method == "HEAD" else method, path))


def route_path(scope: Mapping[str, Any]) -> str:
    """The path below ``--root-path``, by the rule of Starlette's router: both must see the same route."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    if not root or not path.startswith(root):
        return path
    if path == root:
        return ""
    return path[len(root) :] if path[len(root)] == "/" else path
