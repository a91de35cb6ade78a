"""A server, or whoever has named things there, drives nobody's terminal: every command, every answer, every error.

Every text of every answer holds escape sequences; so do messages, hints and details of refusals. What commands print is
looked at as it goes to a terminal and to a pipe.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import grpc
import pytest
from google.protobuf import any_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from saltern.cli.app import cli
from saltern.cli.examples import EXAMPLES
from saltern.rpc_errors import ERROR_DOMAIN, STATUS_DETAILS_KEY
from tests.clients.cli.conftest import Outcome, Saltern

#: A title of the window, a bell, the screen cleared in 8 bits, and text that is shown backwards.
EVIL = "a\x1b]0;evil\x07\x9b2J\u202eb"
_FORBIDDEN = ("\x1b]", "\x07", "\x9b", "\u202e")
_SECRET = "sk-saltern-" + "0" * 16 + "-" + "A" * 43
#: They ask no control plane.
_OFFLINE = {"bench", "completion", "demo", "replay", "serve", "trace", "up"}
#: With ``--wait`` they wait for what this server never says.
_ENDLESS = {"key-encryption-key rotate", "node drain"}
_DEPTH_MAX = 4


def fill(message: Message, depth: int = 0) -> None:
    """Set every field: texts to ``EVIL``, numbers to 1, one of each that may be several."""
    for field in message.DESCRIPTOR.fields:
        choice = field.containing_oneof
        if field.name == "next_page_token" or (choice is not None and field.name != choice.fields[0].name):
            continue  # one page is enough
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is None:
                value[EVIL] = EVIL if isinstance(value.get(EVIL, 0), str) else 1
        elif field.message_type is not None:
            inner = value.add() if hasattr(value, "add") else value
            inner.SetInParent()
            if depth < _DEPTH_MAX and field.message_type.full_name != "google.protobuf.Struct":
                fill(inner, depth + 1)
        else:
            one: Any = {FieldDescriptor.CPPTYPE_STRING: EVIL, FieldDescriptor.CPPTYPE_BOOL: True}.get(field.cpp_type, 1)
            if field.type == FieldDescriptor.TYPE_BYTES:
                one = EVIL.encode()
            if hasattr(value, "append"):
                value.append(one)
            else:
                setattr(message, field.name, one)


class HostileServer(grpc.GenericRpcHandler):
    """Answers every method with what :func:`fill` makes of its answer, or with a refusal of the same kind."""

    def __init__(self) -> None:
        self.refuses = False
        self.called: set[str] = set()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        service, _, name = handler_call_details.method.lstrip("/").rpartition("/")
        if not service.startswith("saltern."):
            return None
        method = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]
        response = message_factory.GetMessageClass(method.output_type)()
        fill(response)
        if name == "ExchangeApiKey":
            response.access_token = "x.y.z"  # it goes into a header, where gRPC takes no such thing

        def answer(_request: bytes, context: grpc.ServicerContext) -> bytes:
            self.called.add(method.full_name)
            context.set_trailing_metadata((("saltern-policy-version", "1"),))
            if self.refuses and name != "ExchangeApiKey":
                refuse(context)
            return response.SerializeToString()

        def stream(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            yield answer(request, context)

        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(answer)


def refuse(context: grpc.ServicerContext) -> None:
    """End the call with a status whose every text is hostile."""
    status = status_pb2.Status(code=grpc.StatusCode.FAILED_PRECONDITION.value[0], message=EVIL)
    for detail in (
        error_details_pb2.ErrorInfo(reason="EVIL", domain=ERROR_DOMAIN, metadata={"what": EVIL}),
        error_details_pb2.LocalizedMessage(locale="en", message=EVIL),
    ):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    context.set_trailing_metadata(((STATUS_DETAILS_KEY, status.SerializeToString()),))
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, "evil")


@contextmanager
def serving(handler: HostileServer) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4), handlers=(handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def leaves(group: click.Group, *words: str) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, *words, name)
        else:
            yield " ".join((*words, name)), command


def invocations() -> Iterator[list[str]]:
    """What the examples show of every command that asks a control plane."""
    for path, command in leaves(cli):
        if path.split()[0] in _OFFLINE:
            continue
        endless = {"--follow", "--wait"} if path in _ENDLESS else {"--follow"}
        shown = re.findall(r"^\s*(saltern .*)$", command.help or "", re.MULTILINE)
        for example in (*EXAMPLES.get(path, ()), *shown):
            words = shlex.split(re.split(r" [|>] ", example)[0])[1:]
            agrees = any("--yes" in option.opts for option in command.params) and "--yes" not in words
            yield [word for word in (*words, *(["--yes"] if agrees else [])) if word not in endless]


@pytest.fixture
def run(offline: Saltern, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Saltern, HostileServer]]:
    handler = HostileServer()
    monkeypatch.chdir(tmp_path)
    Path("key").write_text(_SECRET)
    Path("bootstrap-token").write_text("bootstrap-saltern-" + "A" * 43)
    Path("tenants.yaml").write_text("apiVersion: saltern/v1\nkind: Tenant\nname: acme\nnamespaces: []\n")
    with serving(handler) as endpoint:

        def calling(*arguments: str) -> Outcome:
            words = ["--control", endpoint, "--api-key-file", "key", "--deadline-ms", "2000", *arguments]
            if arguments[0] == "top":
                words += ["--once", "--interval", "0.2"]
            if arguments[0] == "key" and arguments[1] == "redeem-bootstrap":
                words[words.index("127.0.0.1:7700")] = endpoint
            return offline(*words)

        yield calling, handler


@pytest.mark.parametrize("refuses", [False, True], ids=["answers", "refusals"])
@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_i10_no_text_of_a_server_drives_the_terminal(
    run: tuple[Saltern, HostileServer], monkeypatch: pytest.MonkeyPatch, terminal: bool, refuses: bool
) -> None:
    saltern, server = run
    server.refuses = refuses
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # for rich this is a terminal then
    shown = 0
    for number, arguments in enumerate(invocations()):
        outcome = saltern(*arguments, *(("--debug",) if number % 4 == 0 else ()))
        text = outcome.out + outcome.err
        assert not [one for one in _FORBIDDEN if one in text], (arguments, text)
        shown += "evil" in text
    assert shown > 30, "hostile texts are shown, escaped"
    assert len(server.called) > 40
