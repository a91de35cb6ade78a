"""Clients of a cluster in a process of their own: one that keeps its token, and one with a new token for each session.

Run as a script it works until its standard input ends; for each round it prints one line of JSON: the kid of the token
that it was given, and what went wrong.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class TokenLoad:
    """What the clients have met until now."""

    def __init__(self) -> None:
        self.kids: list[str] = []
        self.failures: list[str] = []

    def follow(self, lines: Iterator[str]) -> None:
        for line in lines:
            told = json.loads(line)
            self.failures += told["failures"]
            self.kids.append(told["kid"])


@asynccontextmanager
async def token_load(control: str, api_key: str, wire_endpoints: list[str]) -> AsyncIterator[TokenLoad]:
    """Run the clients until the end of the block; the control plane may be in this process, on this event loop."""
    command = [sys.executable, "-m", "tests.support.token_load", control, *wire_endpoints]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        load = TokenLoad()
        following = threading.Thread(target=load.follow, args=(process.stdout,))
        following.start()
        try:
            process.stdin.write(api_key + "\n")
            process.stdin.flush()
            yield load
        finally:
            process.stdin.close()
            await asyncio.to_thread(following.join, 60)
            if process.wait(60):
                load.failures.append("the clients ended with an error")


def main() -> None:
    import jwt

    from saltern.client import Client
    from saltern.errors import SalternError
    from saltern.exchange import exchange_api_key
    from saltern.names import NamespaceId
    from saltern.results import Hit
    from tests.support.served_node import connect

    control, *endpoints = sys.argv[1:]
    api_key = sys.stdin.readline().strip()
    stopped = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stopped.set()), daemon=True).start()
    with Client(control=control, api_key=api_key, namespace="chat", deadline_ms=20_000) as client:
        (name,) = client.block_keys([bytes(32)])
        client.put_many([(name, b"x" * 1000)])
        while not stopped.is_set():
            failures = []
            (result,) = client.get_many([name])
            if not isinstance(result, Hit):
                failures.append(repr(result))
            # As if the token had run out this moment: any gap of a rotation is met by one of these.
            token = exchange_api_key(control, api_key, NamespaceId("chat"), timeout_ms=20_000).access_token
            for endpoint in endpoints:
                with connect(endpoint) as session:
                    try:
                        session.hello(token)
                    except SalternError as error:
                        failures.append(error.reason)
            print(json.dumps({"kid": jwt.get_unverified_header(token)["kid"], "failures": failures}), flush=True)


if __name__ == "__main__":
    main()
