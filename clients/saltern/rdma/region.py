"""Memory that a device may use."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, ClassVar, Final

from saltern.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError
from saltern.rdma.bindings.interface import Handle, Registration
from saltern.rdma.device import ProtectionDomain
from saltern.rdma.faults import verbs
from saltern.rdma.resource_tree import Resource
from saltern.rdma.values import Access, LocalSpan, RemoteSpan

if TYPE_CHECKING:
    from typing_extensions import Buffer

_WRITES: Final = Access.LOCAL_WRITE | Access.REMOTE_WRITE


class Region(Resource):
    """A registered buffer: pinned for the device until ``close``, and held in place by a memoryview until then.

    Whoever owns the buffer cannot close or resize it meanwhile (BufferError). Closing is revocation: from then on the
    device refuses the keys, so that the memory may serve something else (I7).

    Args:
        buffer: C-contiguous; writable if ``access`` has a write in it.
        access: what the other side may do. Write access of the other side needs ``LOCAL_WRITE``, too.

    Attributes:
        address: of the first byte, as work requests name it.
        local_key, remote_key: plain integers, taken when it was registered.

    Raises:
        InvalidArgumentError: RDMA_BUFFER_INVALID: empty, not contiguous, or read-only with write access.
        ResourceExhaustedError: RDMA_MEMLOCK, RDMA_REGION_TOO_LARGE.
        FailedPreconditionError: RDMA_MEMORY_INVALID.
    """

    kind: ClassVar[str] = "region"
    close_rank: ClassVar[int] = 1

    def __init__(self, domain: ProtectionDomain, buffer: Buffer, access: Access = Access.LOCAL_WRITE) -> None:
        super().__init__(domain.device.binding, domain)
        _check_access(access)
        self._view: memoryview | None = _contiguous(buffer, access)
        self.access = access
        self.length_bytes = self._view.nbytes
        self.address = _address(self._view)
        try:
            _check_length(self.length_bytes, domain)
            with verbs(f"registering {self.length_bytes} bytes with {domain.device.name}"):
                self._take(self._binding.register(domain.handle, self.address, self.length_bytes, access))
        except BaseException:
            self._view.release()
            raise

    def _take(self, registration: Registration) -> None:
        self.local_key, self.remote_key = registration.local_key, registration.remote_key
        self._open(registration.handle)

    @classmethod
    def from_dmabuf(
        cls,
        domain: ProtectionDomain,
        descriptor: int,
        length_bytes: int,
        access: Access = Access.LOCAL_WRITE,
        *,
        offset_bytes: int = 0,
    ) -> Region:
        """Memory of another device (a GPU) that its driver exports as a dma-buf; the descriptor stays the caller's.

        ``address`` is ``offset_bytes``: that is how work requests name its first byte.

        Raises:
            FailedPreconditionError: RDMA_DMABUF_NOT_OFFERED: by the binding or by the device.
        """
        binding = domain.device.binding
        if not binding.offers_dmabuf:
            raise _no_dmabuf(f"the {binding.name} binding")
        _check_access(access)
        _check_length(length_bytes, domain)
        region = cls.__new__(cls)
        Resource.__init__(region, binding, domain)
        region._view, region.access = None, access
        region.length_bytes, region.address = length_bytes, offset_bytes
        try:
            with verbs(f"registering a dma-buf of {length_bytes} bytes with {domain.device.name}"):
                region._take(binding.register_dmabuf(domain.handle, descriptor, offset_bytes, length_bytes, access))
        except FailedPreconditionError as error:
            if error.reason != "RDMA_NOT_OFFERED":
                raise
            raise _no_dmabuf(f"device {domain.device.name}") from error
        return region

    def local(self, offset_bytes: int = 0, length_bytes: int | None = None) -> LocalSpan:
        """Bytes of this region for an operation of this side. Raises RDMA_OUT_OF_REGION, RDMA_CLOSED."""
        address, length = self._bounds(offset_bytes, length_bytes)
        return LocalSpan(address, length, self.local_key)

    def remote(self, offset_bytes: int = 0, length_bytes: int | None = None) -> RemoteSpan:
        """The same for the other side to read or write; what it gets is an address and a key, so access must allow it.

        Raises:
            InvalidArgumentError: RDMA_OUT_OF_REGION.
            FailedPreconditionError: RDMA_CLOSED, RDMA_LOCAL_ONLY: the region gives no remote access (I3).
        """
        if not self.access & (Access.REMOTE_READ | Access.REMOTE_WRITE):
            raise FailedPreconditionError(
                "this RDMA region is for this side's device only (I3)",
                reason="RDMA_LOCAL_ONLY",
                hint="let the side that owns it issue the transfer",
            )
        address, length = self._bounds(offset_bytes, length_bytes)
        return RemoteSpan(address, length, self.remote_key)

    def _bounds(self, offset_bytes: int, length_bytes: int | None) -> tuple[int, int]:
        self.handle  # noqa: B018 - raises where it is closed
        length = self.length_bytes - offset_bytes if length_bytes is None else length_bytes
        if offset_bytes < 0 or length < 0 or offset_bytes + length > self.length_bytes:
            raise InvalidArgumentError(
                f"{length} bytes at {offset_bytes} are outside of an RDMA region of {self.length_bytes} bytes",
                reason="RDMA_OUT_OF_REGION",
            )
        return self.address + offset_bytes, length

    def _destroy(self, handle: Handle) -> None:
        self._binding.deregister(handle)
        # Only now: memory that is freed under a registration is still the device's to write.
        if self._view is not None:
            self._view.release()


def _check_access(access: Access) -> None:
    if access & Access.REMOTE_WRITE and not access & Access.LOCAL_WRITE:
        raise InvalidArgumentError(
            "an RDMA region with remote write access needs local write access",
            reason="RDMA_ACCESS_INVALID",
            hint="use Access.REMOTE_WRITE | Access.LOCAL_WRITE",
        )


def _check_length(length_bytes: int, domain: ProtectionDomain) -> None:
    limit_bytes = domain.device.limits.max_region_bytes
    if length_bytes <= 0:
        raise InvalidArgumentError("an RDMA region cannot be empty", reason="RDMA_BUFFER_INVALID")
    if length_bytes > limit_bytes:
        raise ResourceExhaustedError(
            f"a region of {length_bytes} bytes is larger than the {limit_bytes} that {domain.device.name} takes",
            reason="RDMA_REGION_TOO_LARGE",
            hint="register it in parts",
        )


def _contiguous(buffer: Buffer, access: Access) -> memoryview:
    with memoryview(buffer) as view:
        if not view.c_contiguous or (view.readonly and access & _WRITES):
            raise InvalidArgumentError(
                f"cannot register a buffer that is {'not contiguous' if not view.c_contiguous else 'read-only'}",
                reason="RDMA_BUFFER_INVALID",
                hint="pass contiguous memory, writable unless it is only read from",
            )
        return view.cast("B") if view.nbytes else memoryview(b"")


class _PyBuffer(ctypes.Structure):
    """``Py_buffer`` of CPython's C API: the way to the address of a read-only buffer."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


def _address(view: memoryview) -> int:
    """Where the bytes are. Good for as long as ``view`` is not released."""
    raw = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(raw), 0)
    try:
        return raw.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(raw))


def _no_dmabuf(who: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"{who} registers no dma-buf",
        reason="RDMA_DMABUF_NOT_OFFERED",
        hint="register host memory and copy through it; GPU memory needs a NIC, a driver and a binding that offer it",
    )
