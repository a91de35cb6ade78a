"""Every method of every service of ours, from the descriptors: what a .proto file gains is fuzzed from then on."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import saltern

CACHE_SERVICE = "saltern.cache.v1.CacheService"


@dataclass(frozen=True)
class Method:
    """One method of a service."""

    descriptor: MethodDescriptor

    @property
    def service(self) -> str:
        return self.descriptor.containing_service.full_name

    @property
    def name(self) -> str:
        return self.descriptor.name

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"

    @property
    def request(self) -> Descriptor:
        return self.descriptor.input_type

    @property
    def is_stream_of_requests(self) -> bool:
        return self.descriptor.client_streaming

    @property
    def is_stream_of_responses(self) -> bool:
        return self.descriptor.server_streaming

    @property
    def may_wait(self) -> bool:
        """Whether an answer may take as long as nothing happens."""
        return self.is_stream_of_requests or self.name.startswith(("WaitFor", "Watch"))

    @property
    def is_ours(self) -> bool:
        """Whether it is no service that every gRPC server has."""
        return self.service.startswith("saltern.")

    def new_request(self) -> Message:
        return GetMessageClass(self.descriptor.input_type)()

    def parse_response(self, encoded: bytes) -> Message:
        return GetMessageClass(self.descriptor.output_type).FromString(encoded)


def all_methods() -> list[Method]:
    """Those of every generated module, in one order on every machine."""
    methods = []
    for module in pkgutil.walk_packages(saltern.__path__, "saltern."):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(module.name).DESCRIPTOR
            for service in file.services_by_name.values():
                methods += [Method(descriptor) for descriptor in service.methods]
    return sorted(methods, key=lambda method: method.path)


def standard_methods() -> list[Method]:
    """Of health and reflection, which both servers have."""
    services = (
        health_pb2.DESCRIPTOR.services_by_name["Health"],
        reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
    )
    return [Method(descriptor) for service in services for descriptor in service.methods]


def control_methods() -> list[Method]:
    return [method for method in all_methods() if method.service != CACHE_SERVICE] + standard_methods()


def cache_methods() -> list[Method]:
    return [method for method in all_methods() if method.service == CACHE_SERVICE] + standard_methods()
