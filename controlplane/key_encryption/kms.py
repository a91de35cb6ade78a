"""A key management service behind a plug-in of the Kubernetes KMS v2 API, over a Unix socket.

It holds a key of its own that never leaves it, and is asked twice in a key's life: to seal a new key-encryption key,
and to open it at each start of a control plane. In between nothing waits for it, and nothing stops when it is away.
"""

from __future__ import annotations

import asyncio
import base64
import os
import stat
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message

from saltern.errors import DataLossError, FailedPreconditionError, InvalidArgumentError, SalternError, UnavailableError
from saltern.kms.v2 import kms_pb2

#: For all tries of one call together.
DEADLINE_S: Final = 10.0
_TRY_S: Final = 3.0
_PAUSES_S: Final = (0.1, 0.3, 1.0, 2.0)
_SERVICE: Final = "/v2.KeyManagementService"
_MESSAGE_MAX_BYTES: Final = 64 * 1024
_SCHEME: Final = "unix://"
_ROOT: Final = 0
_RETRIED: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
_ResponseT = TypeVar("_ResponseT", bound=Message)


@dataclass(frozen=True, slots=True)
class SealedKey:
    """A key as the service has encrypted it.

    Attributes:
        sealed_by: what the service calls the key that it used.
        annotations: to be given back with it; values in base64.
    """

    ciphertext: bytes = field(repr=False)
    sealed_by: str
    annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class KmsStatus:
    """How the service is: ``seals_with`` names the key that it encrypts with now."""

    seals_with: str


class KmsClient:
    """Calls the plug-in at ``unix:///path``. Close it."""

    def __init__(self, endpoint: str, *, deadline_s: float = DEADLINE_S) -> None:
        """Connects at the first call, not here.

        Raises:
            InvalidArgumentError: reason INVALID_KMS_ENDPOINT.
        """
        path = endpoint.removeprefix(_SCHEME)
        if not endpoint.startswith(_SCHEME) or not path.startswith("/"):
            raise InvalidArgumentError(
                f"{endpoint!r} is not the socket of a KMS plug-in",
                reason="INVALID_KMS_ENDPOINT",
                hint="write unix:///run/kms.sock: the plug-in runs on this host, and whoever may open its socket may"
                " use the key",
            )
        self.endpoint = endpoint
        self._path = path
        self._deadline_s = deadline_s
        self._channel = grpc.aio.insecure_channel(
            f"unix:{path}",
            options=[
                ("grpc.enable_http_proxy", 0),
                ("grpc.max_receive_message_length", _MESSAGE_MAX_BYTES),
                ("grpc.max_reconnect_backoff_ms", 1000),
                # Else gRPC names the percent-encoded path, which some servers refuse.
                ("grpc.default_authority", "localhost"),
            ],
        )

    async def close(self) -> None:
        await self._channel.close()

    def _require_trusted_socket(self) -> None:
        """Sealing shows a key to whoever listens, so a socket that anybody may have put there is not called.

        Raises:
            FailedPreconditionError: reason KMS_SOCKET_UNTRUSTED.
        """
        try:
            folder, sock = Path(self._path).parent.stat(), Path(self._path).lstat()
        except OSError:
            return  # nobody listens; the call says so
        if stat.S_ISSOCK(sock.st_mode) and (sock.st_uid in (_ROOT, os.geteuid()) or not folder.st_mode & stat.S_IWOTH):
            return
        raise FailedPreconditionError(
            f"the socket {self._path} may be anybody's: user {sock.st_uid} has put it into a folder where all may",
            reason="KMS_SOCKET_UNTRUSTED",
            hint="let the plug-in listen in a folder of its own that others cannot write, such as /run/kms",
        )

    async def status(self) -> KmsStatus:
        """Ask how it is, once.

        Raises:
            UnavailableError: reason KMS_UNAVAILABLE: it does not answer, or says that it is not well.
            FailedPreconditionError: reason KMS_VERSION: it speaks another version of the API.
        """
        request, answer_type = kms_pb2.StatusRequest(), kms_pb2.StatusResponse
        answer = await self._try("Status", request, answer_type, min(_TRY_S, self._deadline_s))
        if isinstance(answer, SalternError):
            raise answer
        if answer.version not in ("v2", "v2beta1"):
            raise FailedPreconditionError(
                f"the KMS plug-in at {self.endpoint} speaks {answer.version[:32]!r}, not v2",
                reason="KMS_VERSION",
                hint="use a plug-in for version 2 of the Kubernetes KMS API",
            )
        if answer.healthz != "ok":
            raise self._unavailable(f"says {answer.healthz[:128]!r} of itself")
        return KmsStatus(answer.key_id)

    async def seal(self, key: bytes) -> SealedKey:
        """Encrypt ``key``; raises UnavailableError (KMS_UNAVAILABLE), FailedPreconditionError (KMS_REFUSED)."""
        request = kms_pb2.EncryptRequest(plaintext=key, uid=str(uuid.uuid4()))
        answer = await self._call("Encrypt", request, kms_pb2.EncryptResponse)
        annotations = {name: base64.b64encode(value).decode("ascii") for name, value in answer.annotations.items()}
        if not answer.ciphertext or key in answer.ciphertext:
            raise FailedPreconditionError(
                f"the KMS plug-in at {self.endpoint} has not encrypted what it was given",
                reason="KMS_REFUSED",
                hint="look at the plug-in's configuration and log",
            )
        return SealedKey(answer.ciphertext, answer.key_id, annotations)

    async def open(self, sealed: SealedKey) -> bytes:
        """Decrypt what :meth:`seal` gave; raises as it, and DataLossError (WRAPPED_SECRET_DAMAGED)."""
        request = kms_pb2.DecryptRequest(
            ciphertext=sealed.ciphertext,
            uid=str(uuid.uuid4()),
            key_id=sealed.sealed_by,
            annotations={name: base64.b64decode(value) for name, value in sealed.annotations.items()},
        )
        key = (await self._call("Decrypt", request, kms_pb2.DecryptResponse)).plaintext
        if not key:
            raise DataLossError(
                f"the KMS plug-in at {self.endpoint} has decrypted nothing", reason="WRAPPED_SECRET_DAMAGED"
            )
        return key

    async def _call(self, method: str, request: Message, answer_type: type[_ResponseT]) -> _ResponseT:
        """Call until it answers or the deadline is near; a refusal is not asked again."""
        ends_s = monotonic() + self._deadline_s
        pauses_s = iter(_PAUSES_S)
        while True:
            answer = await self._try(method, request, answer_type, min(_TRY_S, max(0.1, ends_s - monotonic())))
            if not isinstance(answer, SalternError):
                return answer
            pause_s = next(pauses_s, None)
            if not isinstance(answer, UnavailableError) or pause_s is None or monotonic() + pause_s >= ends_s:
                raise answer
            await asyncio.sleep(pause_s)

    async def _try(
        self, method: str, request: Message, answer_type: type[_ResponseT], timeout_s: float
    ) -> _ResponseT | SalternError:
        serialize: Callable[[Any], bytes] = type(request).SerializeToString
        call: Any = self._channel.unary_unary(
            f"{_SERVICE}/{method}", request_serializer=serialize, response_deserializer=answer_type.FromString
        )
        self._require_trusted_socket()
        try:
            answer: _ResponseT = await call(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            # The plug-in's words stay out: they may repeat what it was given.
            if error.code() in _RETRIED:
                return self._unavailable(f"does not answer ({error.code().name})")
            return FailedPreconditionError(
                f"the KMS plug-in at {self.endpoint} refused {method}: {error.code().name}",
                reason="KMS_REFUSED",
                hint="look at the plug-in's log: the key may be disabled or gone, or its credentials may have ended",
            )
        return answer

    def _unavailable(self, what: str) -> UnavailableError:
        return UnavailableError(
            f"the KMS plug-in at {self.endpoint} {what}",
            reason="KMS_UNAVAILABLE",
            hint="start the plug-in; control planes that run already go on without it, a start and a rotation need it",
            retry_after_ms=1000,
        )
