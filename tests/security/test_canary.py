"""Every secret in every text of every method, found from the descriptors; and nowhere to be read afterwards (I11)."""

from __future__ import annotations

import asyncio
import io
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from controlplane.server import SERVICE_NAMES
from saltern import tracing
from saltern.admin.v1 import credentials_pb2
from tests.controlplane.audit.test_canaries import (
    Errors,
    binary_secrets,
    everything_exported,
    forms_of,
    logged,  # noqa: F401 (a fixture)
)
from tests.support.admin import Metadata
from tests.support.control import Control, bearer, control_plane, migrate, text_of
from tests.support.scraping import Scrape

_DEPTH_MAX = 4


def fill(message: Message, text: str, depth: int = 0) -> None:
    """Set every text of a message to ``text``, and of the messages in it."""
    if depth > _DEPTH_MAX:
        return
    descriptor: Descriptor = message.DESCRIPTOR
    for field in descriptor.fields:
        choice = field.containing_oneof
        if choice is not None and field.name != choice.fields[0].name:
            continue  # of several only one can be set
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        value = getattr(message, field.name)
        if is_map:
            continue  # counts by name, of nodes' reports
        if field.message_type is not None:
            inner = value.add() if hasattr(value, "add") else value
            if not field.message_type.full_name.startswith("google.protobuf."):
                inner.SetInParent()
                fill(inner, text, depth + 1)
        elif field.type == FieldDescriptor.TYPE_STRING:
            if isinstance(value, str):
                setattr(message, field.name, text)
            else:
                value.append(text)


def methods() -> Iterator[MethodDescriptor]:
    for service in SERVICE_NAMES:
        yield from descriptor_pool.Default().FindServiceByName(service).methods


async def call(channel: grpc.aio.Channel, method: MethodDescriptor, text: str, metadata: Metadata | None) -> None:
    """Call ``method`` with ``text`` wherever a text goes."""
    request_type = message_factory.GetMessageClass(method.input_type)
    request = request_type()
    fill(request, text)
    path = f"/{method.containing_service.full_name}/{method.name}"
    codec: Any = {
        "request_serializer": request_type.SerializeToString,
        "response_deserializer": message_factory.GetMessageClass(method.output_type).FromString,
    }
    if method.client_streaming:
        await channel.stream_stream(path, **codec)(iter([request]), metadata=metadata).read()
    elif method.server_streaming:
        await channel.unary_stream(path, **codec)(request, metadata=metadata).read()
    else:
        await channel.unary_unary(path, **codec)(request, metadata=metadata)


def readable_by_others(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            yield path


async def everywhere(control: Control, folder: Path, spans: InMemorySpanExporter) -> dict[str, bytes]:
    """What others than their owners may come to read."""
    places = await everything_exported(control)
    page = await asyncio.to_thread(Scrape, control.plane.metrics_endpoint, prefix="saltern_control_")
    places["metrics"] = page.text.encode()
    places["traces"] = b"\n".join(span.to_json().encode() for span in spans.get_finished_spans())
    return places | {f"file {path}": path.read_bytes() for path in readable_by_others(folder)}


async def test_i11_no_secret_that_is_pasted_into_any_text_of_any_method_can_be_read_anywhere(
    postgres: Any,
    tmp_path: Path,
    logged: io.StringIO,  # noqa: F811
) -> None:
    errors, exporter = Errors(), InMemorySpanExporter()
    stop = tracing.start_with(SimpleSpanProcessor(exporter), "canary")
    try:
        with postgres.fresh_database(migrate) as urls:
            async with control_plane(urls, tmp_path) as control:
                bootstrap_token = control.bootstrap_token()
                admin_key = await control.redeem()
                for tenant in ("acme", "globex"):
                    await control.add_tenant(tenant, "chat", limit_bytes=1 << 20)
                writer_key = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme", "writer")
                node_key = await control.add_api_key(credentials_pb2.ROLE_NODE, key_id="node", node_id="node-1")
                tokens = [(await control.exchange(key)).access_token for key in (admin_key, writer_key, node_key)]
                session = await control.exchange(writer_key, "chat")
                texts = {
                    "bootstrap token": bootstrap_token,
                    "administrator's key": admin_key,
                    "tenant's key": writer_key,
                    "node's key": node_key,
                    "administrator's token": tokens[0],
                    "tenant's token": tokens[1],
                    "node's token": tokens[2],
                    "token for nodes": session.access_token,
                }
                # An exchange with the key that it is for succeeds, as it should.
                for name, text in texts.items():
                    metadata = bearer(tokens["tenant" in name])
                    for method in methods():
                        for caller in (metadata, bearer(tokens[2])) if "Node" in method.full_name else (metadata,):
                            await errors.of(call(control.channel, method, text, caller))
                secrets = {name: forms_of(text.encode()) for name, text in texts.items()}
                binary = await binary_secrets(control, text_of(urls.app), tmp_path)
                binary |= {f"salt key {one.epoch}": one.key for one in session.salt_keys}
                secrets |= {name: forms_of(secret) for name, secret in binary.items()}
                places = await everywhere(control, tmp_path, exporter)
    finally:
        stop()
    places["log"] = logged.getvalue().encode()
    places["errors"] = b"\n".join(errors.told)

    assert len(errors.told) > 300 and b"UNEXPECTED" not in places["errors"]
    assert b"unexpected error" not in places["log"]
    assert b"rpc.method" in places["traces"] and b"requests_total" in places["metrics"]
    for place, content in places.items():
        for name, forms in secrets.items():
            cut = {form[:40] for form in forms if len(form) > 40}
            assert not any(form in content for form in forms | cut), f"the {name} is in: {place}"
