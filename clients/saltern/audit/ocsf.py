"""Audit events as the class API Activity (6003) of the Open Cybersecurity Schema Framework, version 1.7.0.

Source: https://schema.ocsf.io/1.7.0/classes/api_activity. What has no place of its own in that class is kept under
``unmapped``; the time, which OCSF counts in milliseconds, is kept whole under ``metadata.original_time``.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from saltern.audit.lines import PLATFORM_CHAIN, ExportedEvent

SCHEMA_VERSION: Final = "1.7.0"
_CATEGORY_UID, _CLASS_UID = 6, 6003
_CREATE, _READ, _UPDATE, _DELETE, _OTHER = 1, 2, 3, 4, 99
#: How the name of a method begins, and what it does.
_ACTIVITIES: Final = (
    ("Create", _CREATE),
    ("Register", _CREATE),
    ("Get", _READ),
    ("List", _READ),
    ("Export", _READ),
    ("Update", _UPDATE),
    ("Set", _UPDATE),
    ("Suspend", _UPDATE),
    ("Resume", _UPDATE),
    ("Rotate", _UPDATE),
    ("Delete", _DELETE),
    ("Revoke", _DELETE),
)
_ACTIVITY_NAMES: Final = {_CREATE: "Create", _READ: "Read", _UPDATE: "Update", _DELETE: "Delete"}
_SUCCESS, _FAILURE = 1, 2
_INFORMATIONAL, _LOW = 1, 2
_PRODUCT: Final = {"name": "Saltern", "vendor_name": "Saltern"}


def to_api_activity(event: ExportedEvent) -> dict[str, Any]:
    """The event as an object of the class API Activity."""
    service, _, operation = event.method.rpartition("/")
    activity = next((number for prefix, number in _ACTIVITIES if operation.startswith(prefix)), _OTHER)
    is_success = event.outcome == "success"
    api: dict[str, Any] = {"operation": operation}
    if service:
        api["service"] = {"name": service}
    if event.request_id:
        api["request"] = {"uid": event.request_id}
    if event.reason:
        api["response"] = {"error": event.reason}
    user: dict[str, Any] = {"name": event.actor, "uid": event.actor}
    if event.actor_role:
        user["groups"] = [{"name": event.actor_role, "type": "role"}]
    metadata: dict[str, Any] = {
        "event_code": event.method,
        "log_name": f"audit/{event.chain}",
        "original_time": msgspec.to_builtins(event.event_time),
        "product": _PRODUCT,
        "sequence": event.sequence,
        "uid": event.name,
        "version": SCHEMA_VERSION,
    }
    if event.chain != PLATFORM_CHAIN:
        metadata["tenant_uid"] = event.chain
    activity_name = _ACTIVITY_NAMES.get(activity, operation or "Other")
    record: dict[str, Any] = {
        "activity_id": activity,
        "activity_name": activity_name,
        "actor": {"user": user},
        "api": api,
        "category_name": "Application Activity",
        "category_uid": _CATEGORY_UID,
        "class_name": "API Activity",
        "class_uid": _CLASS_UID,
        "metadata": metadata,
        "severity": "Informational" if is_success else "Low",
        "severity_id": _INFORMATIONAL if is_success else _LOW,
        "src_endpoint": _endpoint(event.peer),
        "status": "Success" if is_success else "Failure",
        "status_id": _SUCCESS if is_success else _FAILURE,
        "time": event.event_time_us // 1000,
        "type_name": f"API Activity: {activity_name if activity != _OTHER else 'Other'}",
        "type_uid": _CLASS_UID * 100 + activity,
        "unmapped": {
            "hash": event.hash,
            "hash_format": event.hash_format,
            "policy_version": event.policy_version,
            "previous_hash": event.previous_hash,
        },
    }
    if event.reason:
        record["status_code"] = event.reason
    if event.resource:
        record["resources"] = [_resource(event)]
    return record


def _resource(event: ExportedEvent) -> dict[str, Any]:
    """The resource acted upon; what it was before and after the act, where that is known."""
    resource: dict[str, Any] = {"name": event.resource, "uid": event.resource}
    values = {"before": event.before, "after": event.after}
    data = {name: value for name, value in values.items() if value is not None}
    if data:
        resource["data"] = data
    return resource


def _endpoint(peer: str) -> dict[str, Any]:
    """Where the call came from; what the service did by itself came from there."""
    if not peer:
        return {"name": "control plane"}
    address, colon, port = peer.rpartition(":")
    if not (colon and port.isdecimal() and int(port) < 2**16):
        return {"name": peer}
    return {"ip": address.removeprefix("[").removesuffix("]"), "port": int(port)}
