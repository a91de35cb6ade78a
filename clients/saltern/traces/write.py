"""Writes a trace as a file that :func:`saltern.traces.load.load_trace` reads back, with its provenance beside it."""

from __future__ import annotations

import gzip
import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from saltern.errors import FailedPreconditionError
from saltern.traces.hash_ids import PROVENANCE_ENDING, encode_request
from saltern.traces.lines import file_sha256
from saltern.traces.request import Trace


@dataclass(frozen=True, slots=True)
class Written:
    """What lies on disk; ``sha256`` is of the file."""

    requests: int
    sha256: str
    provenance_path: Path


def write_trace(trace: Trace, path: Path) -> Written:
    """Write the hash-ids form, gzip if the name ends in ``.gz``; the same trace gives the same bytes.

    The file is there whole or not at all. Its provenance goes to ``PATH.provenance.json``.

    Raises:
        FailedPreconditionError: it cannot be written there. InvalidArgumentError: the trace is damaged.
    """
    started = path.with_name(path.name + ".part")
    provenance_path = path.with_name(path.name + PROVENANCE_ENDING)
    try:
        try:
            requests = _write_lines(trace, started, packed=path.name.endswith(".gz"))
            started.replace(path)
        finally:
            started.unlink(missing_ok=True)
        sha256 = file_sha256(path)
        said = {
            "sha256": sha256,
            "requests": requests,
            "identity": str(trace.identity),
            "identityNote": trace.identity_note,
            "notes": list(trace.notes),
            "blockTokens": trace.block_tokens,
            "provenance": trace.provenance.to_dict(),
        }
        provenance_path.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot write the trace to {str(path)!r} ({error.strerror})",
            reason="CANNOT_WRITE_TRACE",
            hint="name a file in a folder that is there and may be written",
        ) from None
    return Written(requests, sha256, provenance_path)


def _write_lines(trace: Trace, path: Path, *, packed: bool) -> int:
    requests = 0
    with ExitStack() as stack:
        file: IO[bytes] = stack.enter_context(path.open("wb"))
        if packed:  # no time and no name in it: equal requests are equal bytes
            unnamed = gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)
            file = cast(IO[bytes], stack.enter_context(unnamed))
        for request in trace:
            file.write(encode_request(request))
            requests += 1
    return requests
