"""A composition as somebody writes it, in YAML or in options, and the trace that it makes.

::

    seed: 7
    block_tokens: 512            # all parts are re-blocked to it
    clip: {end_s: 900}           # of the whole
    tenants:
      agent: {trace: sessions.jsonl.gz, read: {session_every_s: 30}, think: {cap_s: 60}}
      chat:  {trace: conversation.jsonl.gz, clip: {start_s: 600, end_s: 1500}, scale_time: 0.5, shift_s: 10}
      burst: {trace: synthetic.jsonl.gz, burst: {every_s: 600, length_s: 30}}
      code:  {trace: azure.csv, synthesise: {shared_tokens: 2048, groups: 4}}
      scan:  {scan: {rate_per_s: 0.5, duration_s: 900, input_tokens: 32768}}

What is done to a part is done in this order: read, clip, scale_time, burst, shift_s, think, synthesise, re-block.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import structs

from saltern.errors import InvalidArgumentError
from saltern.names import parse_tenant_id
from saltern.traces import compose
from saltern.traces.hash_ids import BLOCK_TOKENS
from saltern.traces.load import Format, load_trace
from saltern.traces.options import LoadOptions
from saltern.traces.request import Identity, Trace

_HINT: Final = "docs/replay.md shows every field of a composition"


class _Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Clip(_Spec, frozen=True):
    start_s: float = 0.0
    end_s: float = math.inf
    requests: int | None = None


class Burst(_Spec, frozen=True):
    every_s: float
    length_s: float


class Think(_Spec, frozen=True):
    scale: float = 1.0
    cap_s: float = math.inf


class Synthesise(_Spec, frozen=True):
    shared_tokens: int
    groups: int = 1


class Scan(_Spec, frozen=True):
    rate_per_s: float
    duration_s: float
    input_tokens: int


class Read(_Spec, frozen=True):
    """What :class:`LoadOptions` says, but for its seed, which is the composition's."""

    block_tokens: int | None = None
    sort: bool = False
    session_every_s: float = 60.0
    gap_max_s: float = 600.0
    input_tokens: int = 0
    output_tokens: int = 0
    spacing_s: float = 1.0


class Part(_Spec, frozen=True):
    """One tenant: a trace file, relative to the composition's, or a scan."""

    trace: str | None = None
    format: Format | None = None
    read: Read = Read()
    clip: Clip | None = None
    scale_time: float | None = None
    burst: Burst | None = None
    shift_s: float | None = None
    think: Think | None = None
    synthesise: Synthesise | None = None
    scan: Scan | None = None


class Composition(_Spec, frozen=True):
    """All of it. ``block_tokens`` is needed where parts have different ones; otherwise it is theirs."""

    tenants: dict[str, Part]
    block_tokens: int | None = None
    seed: int = 0
    clip: Clip | None = None


def composition_from(value: Any, source: str) -> Composition:
    """A composition from lists and mappings, numbers being numbers or their text.

    Raises:
        InvalidArgumentError: reason INVALID_COMPOSITION: a field that is unknown or of another kind; names the place.
    """
    try:
        return msgspec.convert(value, Composition, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidArgumentError(f"{source}: {str(error)[:300]}", reason="INVALID_COMPOSITION", hint=_HINT) from None


def read_composition(path: Path) -> Composition:
    """A composition from a YAML file; raises as :func:`composition_from`, and YamlError where it is no YAML."""
    from saltern.apply.yaml_tree import parse_documents

    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot read the composition {str(path)!r} ({error.strerror})", reason="INVALID_COMPOSITION", hint=_HINT
        ) from None
    documents = parse_documents(content, str(path))
    if len(documents) != 1:
        raise InvalidArgumentError(
            f"{path}: {len(documents)} documents instead of one", reason="INVALID_COMPOSITION", hint=_HINT
        )
    return composition_from(_plain(documents[0]), str(path))


def build(composition: Composition, folder: Path) -> Trace:
    """The trace that a composition describes; file names in it are relative to ``folder``.

    Raises:
        NotFoundError, InvalidArgumentError: a part cannot be read, or not be composed with the others.
    """
    block_tokens = composition.block_tokens
    parts = {}
    for number, (tenant, part) in enumerate(composition.tenants.items()):
        parse_tenant_id(tenant)
        parts[tenant] = _build_part(tenant, part, folder, block_tokens, composition.seed + number)
    whole = compose.interleave(parts)
    return _clipped(whole, composition.clip)


def _build_part(tenant: str, part: Part, folder: Path, block_tokens: int | None, seed: int) -> Trace:
    if (part.trace is None) == (part.scan is None):
        raise InvalidArgumentError(
            f"tenant {tenant!r} needs a trace or a scan, and not both", reason="INVALID_COMPOSITION", hint=_HINT
        )
    if part.trace is not None:
        options = LoadOptions(**structs.asdict(part.read), seed=seed)
        trace = load_trace(folder / part.trace, options, file_format=part.format)
    else:
        assert part.scan is not None
        trace = compose.scan(**structs.asdict(part.scan), block_tokens=block_tokens or BLOCK_TOKENS, seed=seed)
    trace = _clipped(trace, part.clip)
    if part.scale_time is not None:
        trace = compose.scale_time(trace, part.scale_time)
    if part.burst is not None:
        trace = compose.burst(trace, every_s=part.burst.every_s, length_s=part.burst.length_s)
    if part.shift_s is not None:
        trace = compose.shift(trace, part.shift_s)
    if part.think is not None:
        trace = compose.limit_think(trace, scale=part.think.scale, cap_s=part.think.cap_s)
    if part.synthesise is not None:
        wanted = structs.asdict(part.synthesise)
        trace = compose.synthesise_ids(trace, **wanted, block_tokens=block_tokens or BLOCK_TOKENS, seed=seed)
    if block_tokens is not None and trace.identity is not Identity.NONE:
        trace = compose.reblock(trace, block_tokens)
    return trace


def _clipped(trace: Trace, clip: Clip | None) -> Trace:
    if clip is None:
        return trace
    return compose.clip(trace, start_s=clip.start_s, end_s=clip.end_s, requests=clip.requests)


def _plain(node: Any) -> Any:
    """A tree of YAML as lists, mappings and text."""
    from saltern.apply import yaml_tree

    if isinstance(node, yaml_tree.Scalar):
        return node.text
    if isinstance(node, yaml_tree.Sequence):
        return [_plain(item) for item in node.items]
    return {name: _plain(entry.value) for name, entry in node.entries.items()}
