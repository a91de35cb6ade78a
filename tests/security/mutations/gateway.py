"""vLLM for many tenants: answers taken away one by one."""

from __future__ import annotations

from typing import Final

from tests.security.mutations.values import Edit, Mutation

_VLLM: Final = "clients/saltern/vllm"
_GATEWAY: Final = "tests/clients/vllm/test_gateway.py"
_REQUESTS: Final = "requests to vLLM that ask for another tenant's blocks"
_LOGGED: Final = "a token read from vLLM's log"
_MADE_UP: Final = "credentials that a stranger makes up at vLLM's gateway"

MUTATIONS: Final = (
    Mutation(
        _REQUESTS,
        (
            Edit(
                f"{_VLLM}/gateway_bodies.py",
                'body["cache_salt"] = cache_salt',
                'body.setdefault("cache_salt", cache_salt)',
            ),
        ),
        (f"{_GATEWAY}::test_i2_the_salt_follows_from_the_token_and_whatever_the_body_says_is_overwritten",),
    ),
    Mutation(
        _REQUESTS,
        (
            Edit(
                f"{_VLLM}/gateway_routes.py",
                '    ("POST", "/v1/embeddings"): _SALTED,\n',
                '    ("POST", "/v1/embeddings"): _SALTED,\n    ("POST", "/rerank"): _VERIFIED,\n',
            ),
        ),
        (f"{_GATEWAY}::test_i10_routes_that_are_not_known_to_be_salted_are_refused",),
    ),
    Mutation(
        _REQUESTS,
        (Edit(f"{_VLLM}/gateway_bodies.py", "if len(names) != len(pairs):", "if len(names) > len(pairs):"),),
        (f"{_GATEWAY}::test_i1_bodies_that_two_parsers_could_read_differently_are_refused",),
    ),
    Mutation(
        _REQUESTS,
        (Edit(f"{_VLLM}/gateway_bodies.py", "(is_content or MEDIA_FIELDS & part.keys())", "is_content"),),
        (f"{_GATEWAY}::test_i2_no_id_of_media_reaches_the_engine_as_its_caller_wrote_it",),
    ),
    Mutation(
        _MADE_UP,
        (
            Edit(
                f"{_VLLM}/gateway_callers.py",
                "self._strangers_threads if is_stranger else self._verified_threads",
                "self._strangers_threads",
            ),
        ),
        (f"{_GATEWAY}::test_i9_who_makes_up_credentials_takes_no_place_of_those_who_are_known",),
    ),
    Mutation(
        _MADE_UP,
        (
            Edit(
                f"{_VLLM}/gateway_callers.py",
                "if known.grant is None and self._strangers_in_flight",
                "if self._strangers_in_flight",
            ),
        ),
        (f"{_GATEWAY}::test_i10_a_flood_of_strangers_keeps_no_revoked_credential_good",),
    ),
    Mutation(
        _MADE_UP,
        (
            Edit(
                f"{_VLLM}/gateway_callers.py",
                "            raise known.refusal.again()\n",
                "            raise known.refusal\n",
            ),
        ),
        (f"{_GATEWAY}::test_i10_a_refused_request_leaves_nothing_of_itself_behind",),
    ),
    Mutation(
        _LOGGED,
        (
            Edit(
                f"{_VLLM}/token_seal.py",
                "self._cipher.decrypt(nonce, box, frame(_LABEL, cache_salt))",
                'self._cipher.decrypt(nonce, box, frame(_LABEL, ""))',
            ),
            Edit(
                f"{_VLLM}/token_seal.py",
                "self._cipher.encrypt(nonce, token.encode(), frame(_LABEL, cache_salt))",
                'self._cipher.encrypt(nonce, token.encode(), frame(_LABEL, ""))',
            ),
        ),
        ("tests/clients/vllm/test_token_seal.py::test_i1_a_sealed_token_opens_for_its_own_salt_and_key_only",),
    ),
    Mutation(
        _LOGGED,
        (Edit(f"{_VLLM}/request_tenancy.py", " and cache_salt in entry.salts", ""),),
        (
            "tests/clients/vllm/test_request_tenancy.py::"
            "test_i10_without_a_good_token_of_the_requests_own_salt_there_is_no_remote_cache",
        ),
    ),
)
