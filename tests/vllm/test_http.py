"""One vLLM API server behind the gateway, two tenants: what each finds, and what its latency tells of the other."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from saltern.admin_client import read_api_key
from saltern.exchange import exchange_api_key
from saltern.grant import Grant, SaltScopeChoice
from saltern.names import NamespaceId
from saltern.vllm.cache_salts import cache_salts
from tests.vllm.bound import bound
from tests.vllm.deployment import PATIENT
from tests.vllm.engine import BLOCK_TOKENS, prompt
from tests.vllm.models import model_path
from tests.vllm.stack import ROOT, Stack, clean_environment, wait_until

pytestmark = pytest.mark.timeout(600)  # the server's start counts as the first test's

START_S = 400.0
TENANTS = ("http-acme", "http-blue")
#: Of the engine's own cache; small, so that a test can push something out of it.
POOL_BLOCKS = 160
#: Prompts of 24 blocks that fill it.
FILLERS = 8
#: Of a prompt that is planted: long enough that computing it takes a multiple of finding it.
LONG_TOKENS = 28 * BLOCK_TOKENS
TRIALS = 40
TRIALS_MAX = 200
#: So improbable must a difference be under chance for the attacker to have been told something.
SIGNIFICANT = 1e-3


class Server:
    """A vLLM API server behind the gateway."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self.log = folder / "server.log"
        self.keys = {tenant: read_api_key(stack.add_tenant(tenant)).reveal() for tenant in TENANTS}
        self.grants = {tenant: self._exchange(stack, key) for tenant, key in self.keys.items()}
        self.ann = self._exchange(stack, self.keys[TENANTS[0]], user="ann")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        transfer = {
            "kv_connector": "SalternConnector",
            "kv_connector_module_path": "saltern.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": PATIENT | {"control": stack.control, "tenancy": "request"},
        }
        arguments = [
            *("--model", str(model_path("llama")), "--served-model-name", "tiny", "--dtype", "float32"),
            *("--host", "127.0.0.1", "--port", str(self._port), "--enforce-eager", "--max-model-len", "1024"),
            *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(POOL_BLOCKS)),
            *("--kv-cache-memory-bytes", str(64 * 1024 * 1024), "--max-num-seqs", "8"),
            *("--prefix-caching-hash-algo", "sha256_cbor", "--enable-prompt-tokens-details", "--enable-log-requests"),
            *("--middleware", "saltern.vllm.gateway.SalternGateway"),
            *("--kv-transfer-config", json.dumps(transfer)),
        ]
        environment = {
            "SALTERN_GATEWAY_CONTROL": stack.control,
            "SALTERN_GATEWAY_SEAL_KEY_FILE": str(folder / "seal-key"),
            "SALTERN_GATEWAY_NAMESPACE": "chat",
            "VLLM_LOGGING_LEVEL": "DEBUG",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                bound([sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]),
                cwd=ROOT,
                env=clean_environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            wait_until(self._is_ready, START_S, "the API server serves")
        except BaseException:
            self.close()
            raise

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, f"the server ended by itself:\n{self.said()[-6000:]}"
        try:
            return self.call("GET", "/health")[0] == 200
        except OSError:
            time.sleep(0.2)
            return False

    def close(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def call(self, method: str, path: str, body: object = None, token: str = "") -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def complete(self, tokens: Sequence[int], token: str, **more: Any) -> tuple[int, str]:
        """How many tokens of a prompt were found somewhere, and the answer."""
        body = {"model": "tiny", "prompt": list(tokens), "max_tokens": 4, "temperature": 0, **more}
        status, answer = self.call("POST", "/v1/completions", body, token)
        assert status == 200, answer
        parsed = json.loads(answer)
        details = parsed["usage"].get("prompt_tokens_details") or {}
        return details.get("cached_tokens") or 0, parsed["choices"][0]["text"]

    def metric(self, name: str) -> float:
        page = self.call("GET", "/metrics")[1].decode()
        found = re.findall(rf"^{name}{{[^}}]*}} (\S+)$", page, re.MULTILINE)
        assert found, f"no {name}"
        return sum(map(float, found))

    @staticmethod
    def _exchange(stack: Stack, key: str, **scope: str) -> Grant:
        choice = SaltScopeChoice(**scope)
        return exchange_api_key(stack.control, key, NamespaceId("chat"), timeout_ms=10_000, scope=choice)


@pytest.fixture(scope="module")
def server(stack: Stack, engines: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    engines.close()  # one engine at a time is what two cores bear
    server = Server(stack, tmp_path_factory.mktemp("http"))
    yield server
    server.close()


def tokens(count: int, seed: int) -> list[int]:
    made: list[int] = prompt(count, seed)["prompt_token_ids"]
    return made


def test_i2_tenants_of_one_server_find_their_own_and_nothing_of_each_other(server: Server) -> None:
    acme, blue = (server.grants[tenant].access_token for tenant in TENANTS)
    wanted = tokens(8 * BLOCK_TOKENS + 5, seed=1)

    found, answer = server.complete(wanted, acme)
    assert found == 0
    assert server.complete(wanted, acme) == (8 * BLOCK_TOKENS, answer), "the same tenant finds its own"
    assert server.complete(wanted, server.keys[TENANTS[0]])[0] == 8 * BLOCK_TOKENS, "by its API key, too"
    assert server.complete(wanted, server.ann.access_token) == (0, answer), "a user's salt is narrower"

    # Everything that blue could say to be taken for acme.
    salt = cache_salts(server.grants[TENANTS[0]])[-1]
    forged = {"cache_salt": salt, "kv_transfer_params": {"saltern_token": acme}}
    assert server.complete(wanted, blue, **forged) == (0, answer)
    assert server.complete(wanted, blue, **forged)[0] == 8 * BLOCK_TOKENS, "its own, by now"

    # Pushed out of the engine's own cache, it is found in the remote one, by whose it is.
    for seed in range(100, 100 + FILLERS):
        server.complete(tokens(24 * BLOCK_TOKENS, seed), blue)
    before = server.metric("vllm:external_prefix_cache_hits_total")
    assert server.complete(wanted, acme) == (8 * BLOCK_TOKENS, answer)
    assert server.metric("vllm:external_prefix_cache_hits_total") > before, "the hit was a remote one"
    of_acme_alone = tokens(8 * BLOCK_TOKENS, seed=2)
    server.complete(of_acme_alone, acme)
    for seed in range(200, 200 + FILLERS):
        server.complete(tokens(24 * BLOCK_TOKENS, seed), blue)
    before = server.metric("vllm:external_prefix_cache_hits_total")
    assert server.complete(of_acme_alone, blue, **forged)[0] == 0
    assert server.metric("vllm:external_prefix_cache_hits_total") == before


def test_i1_strangers_and_other_routes_are_refused(server: Server) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1}
    assert server.call("POST", "/v1/completions", body)[0] == 401
    assert server.call("POST", "/v1/completions", body, "EMPTY")[0] == 401
    token = server.grants[TENANTS[0]].access_token
    assert server.call("POST", "/v1/completions", body, token[:-8] + "AAAAAAAA")[0] == 401
    for path in ("/v1/audio/transcriptions", "/reset_prefix_cache", "/inference/v1/generate", "/invocations"):
        assert server.call("POST", path, body, token)[0] == 404
    assert server.call("GET", "/v1/models", token=token)[0] == 200


def test_timing_tells_a_planted_prefix_to_who_shares_the_salt_and_to_nobody_else(server: Server) -> None:
    """Two-sample Kolmogorov-Smirnov on the latency of the first token: planted prefixes against fresh prompts.

    The control is an attacker under the victim's own salt: what a server without salts gives to everybody.
    """
    acme, blue = (server.grants[tenant].access_token for tenant in TENANTS)
    order = random.Random(0)
    latency_s: dict[tuple[str, str], list[float]] = {(who, what): [] for who in ("shared", "other") for what in "pf"}
    shared = 1.0
    for trial in itertools.count():
        # A noisy machine takes more trials until the control is clear. That decides nothing about the other tenant.
        if trial >= TRIALS and (shared < SIGNIFICANT or trial == TRIALS_MAX):
            break
        planted = tokens(LONG_TOKENS, seed=1000 + trial)
        server.complete(planted, acme, max_tokens=1)
        probes = [(who, what) for who in ("shared", "other") for what in "pf"]
        order.shuffle(probes)  # whatever drifts, drifts for all alike
        for number, (who, what) in enumerate(probes):
            fresh = tokens(LONG_TOKENS, seed=100_000 + 10 * trial + number)
            began_s = time.perf_counter()
            server.complete(planted if what == "p" else fresh, acme if who == "shared" else blue, max_tokens=1)
            latency_s[who, what].append(time.perf_counter() - began_s)
        shared = kolmogorov_smirnov_p(latency_s["shared", "p"], latency_s["shared", "f"])

    medians = {key: statistics.median(values) * 1000 for key, values in latency_s.items()}
    other = kolmogorov_smirnov_p(latency_s["other", "p"], latency_s["other", "f"])
    print(f"p of no difference: same salt {shared:.2g}, other tenant {other:.2g}; medians in ms: {medians}")
    assert shared < SIGNIFICANT, f"the control tells nothing, so the test does not either: {medians}"
    assert other > SIGNIFICANT, f"the other tenant's latency tells what was planted: {medians}"


def test_nothing_secret_is_in_the_servers_log(server: Server) -> None:
    """Last: of all that the tests before have sent, with vLLM logging requests and details."""
    said = server.said()
    assert "sealed1." in said, "vLLM logs requests, or this test shows nothing"
    grants = [server.ann, *server.grants.values()]
    secrets = [*server.keys.values(), *(grant.access_token for grant in grants)]
    for secret in secrets:
        assert secret not in said
        assert not any(part in said for part in secret.split(".") if len(part) > 40 and part != secret.split(".")[0])
    for grant in grants:
        assert grant.salts[-1].key.hex() not in said and repr(grant.salts[-1].key) not in said


def kolmogorov_smirnov_p(first: Sequence[float], second: Sequence[float]) -> float:
    """The probability of a distance as large if both were of one distribution (Smirnov's asymptotic series)."""
    values = sorted((*first, *second))

    def share(sample: Sequence[float], value: float) -> float:
        return sum(one <= value for one in sample) / len(sample)

    distance = max(abs(share(first, value) - share(second, value)) for value in values)
    size = len(first) * len(second) / (len(first) + len(second))
    scaled = (math.sqrt(size) + 0.12 + 0.11 / math.sqrt(size)) * distance
    if scaled < 0.2:  # the series converges too slowly there, and is 1 to many digits
        return 1.0
    return min(1.0, 2 * sum((1 if k % 2 else -1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101)))
