"""Folders of an object store, written once: an object that is there is never replaced (``If-None-Match: *``).

Needs the extra ``s3`` (obstore). Credentials come from where the store's own tools take them: the environment
(``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ...), a web identity, or the metadata service of the host. They are never
part of a URL, and what the store answers is not repeated: it may name them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

from saltern.errors import FailedPreconditionError, InvalidArgumentError, SalternError, UnavailableError

SCHEMES: Final = ("s3", "gs", "az")
#: For tests, and for mounts that look like one.
_LOCAL_SCHEME: Final = "file"
_TIMEOUT: Final = "30s"
_CONNECT_TIMEOUT: Final = "5s"


def is_object_url(text: str) -> bool:
    """Whether ``text`` names a folder of an object store, not a file."""
    return text.partition("://")[0] in (*SCHEMES, _LOCAL_SCHEME) and "://" in text


class ObjectFolder:
    """The objects below a URL such as ``s3://bucket/audit``. Thread-safe.

    Attributes:
        url: as given, without a slash at its end.
    """

    def __init__(self, url: str) -> None:
        """Connects at the first call, not here.

        Raises:
            InvalidArgumentError: reason INVALID_OBJECT_URL. FailedPreconditionError: reason EXTRA_NOT_INSTALLED.
        """
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        if not is_object_url(url) or parts.username or parts.password or parts.query or parts.fragment:
            raise InvalidArgumentError(
                "that is not the URL of a folder in an object store",
                reason="INVALID_OBJECT_URL",
                hint="write s3://BUCKET/FOLDER; credentials and endpoint come from the environment"
                " (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL)",
            )
        self._obstore = _import_obstore()
        options: dict[str, Any] = {} if parts.scheme == _LOCAL_SCHEME else _options()
        if parts.scheme == _LOCAL_SCHEME:
            self._store = self._obstore.store.LocalStore(parts.path, mkdir=True)
        else:
            self._store = self._obstore.store.from_url(self.url, **options)

    def create(self, name: str, content: bytes) -> bool:
        """Write an object, whole or not at all; False, and nothing is changed, if there is one of that name.

        Raises:
            UnavailableError, FailedPreconditionError: as :meth:`read`.
        """
        try:
            self._obstore.put(self._store, name, content, mode="create", use_multipart=False)
        except self._obstore.exceptions.AlreadyExistsError:
            return False
        except self._obstore.exceptions.PreconditionError:
            return False
        except Exception as error:
            raise self._failure(error, "write to") from None
        return True

    def read(self, name: str) -> bytes | None:
        """The content of an object; None if there is none of that name.

        Raises:
            UnavailableError: reason OBJECT_STORE_UNAVAILABLE. FailedPreconditionError: reason OBJECT_STORE_REFUSED.
        """
        try:
            return bytes(self._obstore.get(self._store, name).bytes())
        except self._obstore.exceptions.NotFoundError:
            return None
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._failure(error, "read from") from None

    def names(self, prefix: str = "", *, after: str = "") -> Iterator[list[str]]:
        """Names that begin with ``prefix``, a path of whole parts, beyond ``after``, ascending; in pages.

        Raises:
            UnavailableError, FailedPreconditionError: as :meth:`read`.
        """
        try:
            pages = self._obstore.list(self._store, prefix or None, offset=after or None, chunk_size=1000)
            for page in pages:
                yield sorted(str(found["path"]) for found in page)
        except SalternError:
            raise
        except Exception as error:
            raise self._failure(error, "list") from None

    def _failure(self, error: Exception, what: str) -> SalternError:
        known = self._obstore.exceptions
        if isinstance(error, known.PermissionDeniedError | known.UnauthenticatedError | PermissionError):
            return FailedPreconditionError(
                f"the object store does not let us {what} {self.url}",
                reason="OBJECT_STORE_REFUSED",
                hint="give this process credentials that may put, get and list there",
            )
        return UnavailableError(
            f"cannot {what} {self.url} ({type(error).__name__})",
            reason="OBJECT_STORE_UNAVAILABLE",
            hint="check the bucket, AWS_REGION and AWS_ENDPOINT_URL; it is tried again where it can be",
            retry_after_ms=1000,
        )


def _options() -> dict[str, Any]:
    import os
    from datetime import timedelta

    # Plain HTTP only where somebody has named such an endpoint: a store on this host.
    plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    return {
        "client_options": {"timeout": _TIMEOUT, "connect_timeout": _CONNECT_TIMEOUT, "allow_http": plain},
        "retry_config": {"max_retries": 3, "retry_timeout": timedelta(seconds=20)},
    }


def _import_obstore() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise FailedPreconditionError(
            "object stores need obstore, which is not installed here",
            reason="EXTRA_NOT_INSTALLED",
            hint="pip install 'saltern[s3]' (or 'saltern-server[s3]'), or name a folder of files",
        ) from None
    return obstore
