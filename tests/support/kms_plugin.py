"""A key management service's plug-in of the Kubernetes KMS v2 API, in a process of its own, which alone holds its key.

``python -m tests.support.kms_plugin SOCKET KEY_FILE``: serves until it is killed. Each line of KEY_FILE is a key in
hexadecimal digits; the last one seals, all of them open. ``SOCKET.health``, if it is there, is what it says of itself.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from saltern.kms.v2 import kms_pb2
from tests.support.waiting import wait_until

_NONCE_BYTES = 12


class KmsProcess:
    """The plug-in as a child process; ``start`` again after ``kill``."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "kms.sock"
        self.key_file = folder / "kms-keys"
        self.process: subprocess.Popen[bytes] | None = None
        self.rotate()

    @property
    def endpoint(self) -> str:
        return f"unix://{self.socket}"

    def rotate(self) -> None:
        """Give it a new key of its own; it is read at each call."""
        with self.key_file.open("a") as file:
            file.write(os.urandom(32).hex() + "\n")

    def say(self, health: str) -> None:
        self.socket.with_suffix(".health").write_text(health)

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.support.kms_plugin", str(self.socket), str(self.key_file)]
        self.process = subprocess.Popen(command)
        wait_until(self.socket.exists)

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


@contextmanager
def kms_process(folder: Path) -> Iterator[KmsProcess]:
    """Run the plug-in for the time of the block."""
    plugin = KmsProcess(folder)
    plugin.start()
    try:
        yield plugin
    finally:
        plugin.kill()


def _name(key: bytes) -> str:
    return f"projects/test/keys/{hashlib.sha256(key).hexdigest()[:8]}"


class _Plugin:
    def __init__(self, socket: Path, key_file: Path) -> None:
        self._health = socket.with_suffix(".health")
        self._key_file = key_file

    def status(self, _request: kms_pb2.StatusRequest, _context: Any) -> kms_pb2.StatusResponse:
        health = self._health.read_text() if self._health.exists() else "ok"
        return kms_pb2.StatusResponse(version="v2", healthz=health, key_id=_name(self._keys()[-1]))

    def encrypt(self, request: kms_pb2.EncryptRequest, _context: Any) -> kms_pb2.EncryptResponse:
        key, nonce = self._keys()[-1], os.urandom(_NONCE_BYTES)
        sealed = AESGCM(key).encrypt(nonce, request.plaintext, b"")
        return kms_pb2.EncryptResponse(ciphertext=sealed, key_id=_name(key), annotations={"nonce.test": nonce})

    def decrypt(self, request: kms_pb2.DecryptRequest, context: Any) -> kms_pb2.DecryptResponse:
        for key in self._keys():
            if _name(key) == request.key_id:
                try:
                    opened = AESGCM(key).decrypt(request.annotations["nonce.test"], request.ciphertext, b"")
                except (InvalidTag, ValueError):
                    break
                return kms_pb2.DecryptResponse(plaintext=opened)
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such key")
        raise AssertionError("aborted")

    def _keys(self) -> list[bytes]:
        return [bytes.fromhex(line) for line in self._key_file.read_text().split()]


def main(socket: Path, key_file: Path) -> None:
    plugin = _Plugin(socket, key_file)
    methods: dict[str, tuple[Callable[..., Any], Any]] = {
        "Status": (plugin.status, kms_pb2.StatusRequest),
        "Encrypt": (plugin.encrypt, kms_pb2.EncryptRequest),
        "Decrypt": (plugin.decrypt, kms_pb2.DecryptRequest),
    }
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            behaviour,
            request_deserializer=request.FromString,
            response_serializer=lambda answer: answer.SerializeToString(),
        )
        for name, (behaviour, request) in methods.items()
    }
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v2.KeyManagementService", handlers),))
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
