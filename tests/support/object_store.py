"""A store with the S3 API in the test's own process, and the environment that clients find it by."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import boto3
import pytest
from moto.server import ThreadedMotoServer

#: The store remembers from server to server.
_NUMBERS = itertools.count(1)
#: What must never be seen in a log, an error or an argument.
SECRET = "object-store-secret-access-key"


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve for the time of the block; gives the URL of a fresh bucket."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        environment = {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        bucket = f"audit-{next(_NUMBERS)}"
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket=bucket)
        client.close()
        yield f"s3://{bucket}"
    finally:
        server.stop()
