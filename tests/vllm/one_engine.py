"""An engine in a process of its own: reads its orders from standard input as JSON, answers with one line of JSON.

::

    {"model": "llama", "connector": {...} or null, "engine": {...}, "prompts": [[seed, tokens], ...]}
    {"tokens": [[...], ...], "hits": [...]}
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.vllm.bound import bound

ROOT = Path(__file__).resolve().parents[2]
#: All of an engine's life, import included, on a machine that is busy.
LIFE_S = 900.0
_STORED_S = 60.0


class Answer(NamedTuple):
    tokens: list[list[int]]
    hits: list[int]


def run_engine(
    prompts: list[tuple[int, int]],
    connector: dict[str, Any] | None,
    model: str = "llama",
    environment: dict[str, str] | None = None,
    **engine: Any,
) -> Answer:
    """Start one, let it generate, wait until it has stored everything, end it.

    Args:
        prompts: seed and length of each.
        connector: its ``kv_connector_extra_config``, or None for none.
        engine: of vLLM.
    """
    orders = {"model": model, "connector": connector, "engine": engine, "prompts": prompts}
    run = subprocess.run(
        bound([sys.executable, "-m", "tests.vllm.one_engine"]),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        input=json.dumps(orders),
        capture_output=True,
        text=True,
        timeout=LIFE_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-6000:]
    answer = json.loads(run.stdout.splitlines()[-1])
    return Answer(answer["tokens"], answer["hits"])


def main() -> None:
    from saltern.vllm.opening import open_instance_client
    from saltern.vllm.options import parse_options
    from tests.vllm.deployment import chains_recorded, configuration
    from tests.vllm.engine import Engine, hit_tokens, prompt, tokens_of

    orders = json.load(sys.stdin)
    extra = orders["connector"]
    with chains_recorded() as chains:
        engine = Engine(None if extra is None else configuration(extra), orders["model"], **orders["engine"])
        outputs = engine.run([prompt(length, seed) for seed, length in orders["prompts"]])
    if extra is not None:
        # Workers are other processes, maybe: what they have stored is seen in the store.
        with open_instance_client(parse_options(extra, os.environ), os.environ) as client:
            end_s = time.monotonic() + _STORED_S
            while not all(client.chain(hashes).lookup().prefix == len(hashes) for hashes in chains):
                assert time.monotonic() < end_s, "not everything was stored"
                time.sleep(0.05)
    print(json.dumps({"tokens": [tokens_of(each) for each in outputs], "hits": [hit_tokens(each) for each in outputs]}))
    engine.close()


if __name__ == "__main__":
    main()
