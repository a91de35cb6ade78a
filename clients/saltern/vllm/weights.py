"""Digests of model files by content: two paths with the same weights share a cache, one whose content changes does not.

Reading hundreds of gigabytes at each start would cost minutes, so the digest of a file is remembered under what
identifies its content to the system: device, inode, size and times of change. A file that was touched is read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from saltern.errors import NotFoundError
from saltern.keys import frame

#: Formats of weights, the first that a folder has counts: others are copies of the same.
_FORMATS: Final = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")
_ADAPTER_FILES: Final = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_CHUNK_BYTES: Final = 16 * 1024 * 1024
_READERS: Final = 4
_DIGEST_CHARACTERS: Final = 64


def default_cache_folder() -> Path:
    """Where digests are remembered: below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "saltern" / "weights"


def weights_digest(model: Path, cache_folder: Path | None = None) -> str:
    """Digest of the weights in a folder, or of a single file.

    Raises:
        NotFoundError: there are none, or they cannot be read.
    """
    if model.is_file():
        return _digest_of([model], cache_folder)
    for pattern in _FORMATS:
        files = sorted(path for path in model.glob(pattern) if path.is_file())
        if files:
            return _digest_of(files, cache_folder)
    raise NotFoundError(
        f"no weights in {str(model)!r}",
        reason="NO_WEIGHTS",
        hint="give the option weights_digest: a name of your own for exactly these weights",
    )


def adapter_digest(adapter: Path, cache_folder: Path | None = None) -> bytes:
    """Digest of a LoRA adapter's weights and configuration.

    Raises:
        NotFoundError: there are none, or they cannot be read.
    """
    files = [adapter / name for name in _ADAPTER_FILES if (adapter / name).is_file()]
    if not files:
        raise NotFoundError(f"no adapter in {str(adapter)!r}", reason="NO_WEIGHTS", hint="name a folder that has one")
    return bytes.fromhex(_digest_of(files, cache_folder))


def _digest_of(files: Sequence[Path], cache_folder: Path | None) -> str:
    try:
        with ThreadPoolExecutor(max_workers=min(_READERS, len(files)), thread_name_prefix="saltern-weights") as readers:
            digests = list(readers.map(lambda path: _file_digest(path, cache_folder), files))
    except OSError as error:
        raise NotFoundError(
            f"cannot read {error.filename!r}: {error.strerror}",
            reason="NO_WEIGHTS",
            hint="check the file's permissions",
        ) from None
    parts: list[str | bytes | int] = ["saltern/weights/1"]
    for path, digest in zip(files, digests, strict=True):
        parts += [path.name, digest]
    return hashlib.blake2b(frame(*parts), digest_size=32).hexdigest()


def _file_digest(path: Path, cache_folder: Path | None) -> str:
    resolved = path.resolve()
    with resolved.open("rb") as file:
        state = os.fstat(file.fileno())
        identity = frame(str(resolved), state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        remembered = cache_folder and cache_folder / hashlib.blake2b(identity, digest_size=32).hexdigest()
        if remembered and (known := _remembered(remembered)):
            return known
        digest = hashlib.blake2b(digest_size=32)
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        after = os.fstat(file.fileno())
    unchanged = (after.st_size, after.st_mtime_ns, after.st_ctime_ns) == (
        state.st_size,
        state.st_mtime_ns,
        state.st_ctime_ns,
    )
    if remembered and unchanged:
        _remember(remembered, digest.hexdigest())
    return digest.hexdigest()


def _remembered(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="ascii")
        return text if len(text) == _DIGEST_CHARACTERS and int(text, 16) >= 0 else None
    except (OSError, ValueError):
        return None


def _remember(path: Path, digest: str) -> None:
    """Write it whole or not at all; a folder that cannot be written to only costs time at the next start."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(digest)
        Path(name).replace(path)
