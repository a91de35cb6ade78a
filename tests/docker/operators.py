"""``python -m tests.docker.operators``: resources of operators against models of their own schemas."""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.docker.manifests import OVERLAYS, rendered


def lost(given: Any, back: Any, path: str = "") -> list[str]:
    """Where a model does not give back what it was given: fields that it does not know."""
    if isinstance(given, dict):
        if not isinstance(back, dict):
            return [path]
        return [found for key, value in given.items() for found in lost(value, back.get(key), f"{path}.{key}")]
    if isinstance(given, list):
        if not isinstance(back, list) or len(given) != len(back):
            return [path]
        return [found for at, value in enumerate(given) for found in lost(value, back[at], f"{path}[{at}]")]
    return [] if given == back else [path]


def main() -> int:
    """Exit status: 0 where every object is one of its model and no field is unknown to it."""
    from cloudcoil.models.cert_manager import v1 as cert_manager  # type: ignore[import-not-found]
    from cloudcoil.models.prometheus_operator import v1 as prometheus  # type: ignore[import-not-found]

    models = {
        "Issuer": cert_manager.Issuer,
        "Certificate": cert_manager.Certificate,
        "ServiceMonitor": prometheus.ServiceMonitor,
    }
    checked, unknown = 0, []
    for item in {json.dumps(item, sort_keys=True): item for name in OVERLAYS for item in rendered(name)}.values():
        if item["kind"] in models:
            known = models[item["kind"]].model_validate(item)
            # What a model does not know it keeps aside, and does not write.
            back = json.loads(known.model_dump_json(by_alias=True, exclude_unset=True))
            extra = getattr(known.spec, "model_extra", None) or {}
            unknown += [
                f"{item['kind']} {item['metadata']['name']}{where}" for where in lost(item["spec"], back["spec"])
            ]
            unknown += [f"{item['kind']} {item['metadata']['name']}.{name}" for name in extra]
            checked += 1
    print(f"{checked} objects of operators, unknown fields: {', '.join(unknown) or 'none'}")
    return 1 if unknown or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
