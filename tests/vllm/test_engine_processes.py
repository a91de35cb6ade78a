"""Engines in processes of their own: nothing that differs from process to process is in a key."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.vllm.deployment import Store
from tests.vllm.one_engine import run_engine

pytestmark = pytest.mark.timeout(6000)

_PROMPTS = [(1, 100), (2, 96), (3, 20)]
_LOADABLE = [96, 64, 0]


def test_a_second_process_finds_what_the_first_one_stored_unless_it_is_given_another_hash_seed(store: Store) -> None:
    first = run_engine(_PROMPTS, store.extra_config())
    assert first.hits == [0, 0, 0]
    second = run_engine(_PROMPTS, store.extra_config())
    assert second.hits == _LOADABLE
    assert second.tokens == first.tokens
    # vLLM hashes a PYTHONHASHSEED that is set into its first block: engines that are to share must agree on it.
    assert run_engine(_PROMPTS, store.extra_config(), environment={"PYTHONHASHSEED": "2"}).hits == [0, 0, 0]


@pytest.mark.parametrize(
    ("model", "namespace_tokens", "loadable"),
    [("llama", 16, [96, 64, 0]), ("mla", 16, [96, 80, 16])],
    ids=["shards", "replicas"],
)
def test_two_ranks_find_what_two_ranks_stored_and_one_rank_does_not(
    new_store: Callable[..., Store],
    request: pytest.FixtureRequest,
    model: str,
    namespace_tokens: int,
    loadable: list[int],
) -> None:
    """Keys without the rank gave others silently wrong tokens. MLA's ranks hold the same bytes: one entry for both."""
    if not request.config.getoption("--tp"):
        pytest.skip("one process per rank: with --tp only")
    two_ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    store = new_store(block_tokens=namespace_tokens)
    expected = run_engine(_PROMPTS, None, model, **two_ranks)
    cold = run_engine(_PROMPTS, store.extra_config(), model, **two_ranks)
    assert (cold.tokens, cold.hits) == (expected.tokens, [0, 0, 0])
    warm = run_engine(_PROMPTS, store.extra_config(), model, **two_ranks)
    assert (warm.tokens, warm.hits) == (expected.tokens, loadable)
    store.stack.add_namespace(store.tenant, "one-rank", block_tokens=32 if model == "llama" else 16)
    store.stack.admin.wait_for_policy()
    alone = run_engine(_PROMPTS, store.extra_config(namespace="one-rank"), model)
    assert alone.hits == [0, 0, 0]
