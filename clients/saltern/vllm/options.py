"""``kv_connector_extra_config``, parsed strictly: an option that is not known is an error that names those that are.

What is not given comes from the environment where the SDK and the CLI have a variable for it: ``SALTERN_CONTROL``,
``SALTERN_API_KEY_FILE``, ``SALTERN_API_KEY``, ``SALTERN_NAMESPACE``, ``SALTERN_GATEWAY_SEAL_KEY_FILE``, and the
``SALTERN_TLS_*`` of :mod:`saltern.tls`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from saltern.errors import InvalidArgumentError
from saltern.sizes import parse_size

_SIZES: Final = ("load_staging_bytes", "save_staging_bytes")
_FROM_ENVIRONMENT: Final = {
    "control": "SALTERN_CONTROL",
    "api_key_file": "SALTERN_API_KEY_FILE",
    "namespace": "SALTERN_NAMESPACE",
    "seal_key_file": "SALTERN_GATEWAY_SEAL_KEY_FILE",
}
_MIB: Final = 1024 * 1024

Milliseconds = Annotated[float, msgspec.Meta(gt=0, le=600_000)]
Size = Annotated[int, msgspec.Meta(ge=4096, le=64 * 1024 * _MIB)]


class ConnectorOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine's configuration says about its remote cache.

    Attributes:
        control: ``host:port`` of the control plane.
        api_key_file: file that holds the API key's secret (role writer); instance tenancy.
        namespace: whose namespace of that key's tenant; instance tenancy.
        project, sharing_group: narrow or widen the salt, as :class:`saltern.Client` does; instance tenancy.
        tenancy: ``instance``: one tenant for the whole engine; ``request``: whoever a request's token names.
        seal_key_file: key file of the gateway, which seals the tokens of requests; request tenancy.
        plain_tokens: tokens of requests count that are not sealed, too; vLLM may log them.
        token_check_s: between two looks at a token that is used: so late a revocation is felt; request tenancy.
        require_cache_salt: a request without ``cache_salt`` gets no remote cache.
        transport: ``auto``, ``rdma``, ``shm`` or ``tcp``.
        load: ``async`` lets other requests run while one is loaded; ``sync`` loads before the forward pass.
        save: whether computed blocks are stored.
        save_generated: whether blocks with generated tokens are stored, too: the next turn finds them.
        lookup_deadline_ms: after this long a lookup is a miss.
        lookup_wait_ms: how long one scheduler step waits for lookups in all; then the request is asked for again.
        load_deadline_ms: for each batch of a load (64 MiB, or 16 MiB through a staging area); then the rest is
            recomputed.
        save_deadline_ms: for each batch that is stored.
        load_threads: requests that are loaded at the same time by each worker.
        load_staging_bytes: host memory of each worker that loads go through where the engine's cache is on a device.
        save_staging_bytes: host memory of each worker. What does not fit when a step ends is not stored, and counted.
        open_wait_ms: how long the engine's start waits for the control plane and the digest of the weights.
        strict_start: a start without a usable remote cache fails, instead of going on without one.
        weights_digest: names the weights, instead of a digest of their files; two engines that say the same must have
            the same.
    """

    control: str = ""
    api_key_file: str = ""
    namespace: str = ""
    project: str = ""
    sharing_group: str = ""
    tenancy: Literal["instance", "request"] = "instance"
    seal_key_file: str = ""
    plain_tokens: bool = False
    token_check_s: Annotated[float, msgspec.Meta(ge=1, le=600)] = 30.0
    require_cache_salt: bool = False
    transport: Literal["auto", "rdma", "shm", "tcp"] = "auto"
    load: Literal["async", "sync"] = "async"
    save: bool = True
    save_generated: bool = True
    lookup_deadline_ms: Milliseconds = 100.0
    lookup_wait_ms: Annotated[float, msgspec.Meta(ge=0, le=10_000)] = 5.0
    load_deadline_ms: Milliseconds = 2000.0
    save_deadline_ms: Milliseconds = 5000.0
    load_threads: Annotated[int, msgspec.Meta(ge=1, le=32)] = 2
    load_staging_bytes: Size = 256 * _MIB
    save_staging_bytes: Size = 256 * _MIB
    open_wait_ms: Annotated[float, msgspec.Meta(ge=0, le=600_000)] = 5000.0
    strict_start: bool = False
    weights_digest: str = ""


def parse_options(given: Mapping[str, Any], environment: Mapping[str, str]) -> ConnectorOptions:
    """Parse ``kv_connector_extra_config``.

    Args:
        given: as in the engine's configuration; sizes as bytes or as text (``256MiB``).
        environment: of the process, for what is not given.

    Raises:
        InvalidArgumentError: an option is unknown, ill-typed or out of its range, or one that is needed is missing.
    """
    known = ConnectorOptions.__struct_fields__
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise _wrong(f"unknown option {unknown[0]!r}", f"the options are: {', '.join(known)}")
    merged: dict[str, Any] = {
        name: environment[variable] for name, variable in _FROM_ENVIRONMENT.items() if environment.get(variable)
    }
    merged |= given
    for name in _SIZES:
        if isinstance(merged.get(name), str):
            merged[name] = parse_size(str(merged[name]), what=name)
    try:
        options = msgspec.convert(merged, ConnectorOptions)
    except msgspec.ValidationError as error:
        raise _wrong(str(error), "see docs/vllm.md for what each option takes") from None
    needed = ("control", "namespace") if options.tenancy == "instance" else ("control",)
    for name in needed:
        if not getattr(options, name):
            variable = _FROM_ENVIRONMENT[name]
            raise _wrong(f"the option {name!r} is missing", f"give it in kv_connector_extra_config, or set {variable}")
    if options.tenancy == "request" and not (options.seal_key_file or options.plain_tokens):
        raise _wrong(
            "the option 'seal_key_file' is missing",
            "give it, or set SALTERN_GATEWAY_SEAL_KEY_FILE; or set plain_tokens",
        )
    if options.tenancy == "instance" and not (options.api_key_file or environment.get("SALTERN_API_KEY")):
        raise _wrong("the option 'api_key_file' is missing", "give it, or set SALTERN_API_KEY_FILE or SALTERN_API_KEY")
    return options


def _wrong(message: str, hint: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"kv_connector_extra_config: {message}", reason="INVALID_CONNECTOR_OPTION", hint=hint)
