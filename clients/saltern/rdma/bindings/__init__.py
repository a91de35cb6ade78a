"""Bindings of libibverbs, imported only when one is asked for: ``pyverbs`` first, then the ``ibverbs`` wheel."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from saltern.errors import FailedPreconditionError, InvalidArgumentError
from saltern.rdma.bindings.interface import Binding

#: Names a binding, as the option does; empty for the first that loads.
ENVIRONMENT: Final = "SALTERN_RDMA_BINDING"


def _pyverbs() -> Binding:
    from saltern.rdma.bindings.pyverbs_binding import PyverbsBinding

    return PyverbsBinding()


def _ibverbs() -> Binding:
    from saltern.rdma.bindings.ibverbs_binding import IbverbsBinding

    return IbverbsBinding()


_LOADERS: Final[dict[str, Callable[[], Binding]]] = {"pyverbs": _pyverbs, "ibverbs": _ibverbs}
BINDING_NAMES: Final = tuple(_LOADERS)


def load_binding(name: str = "") -> Binding:
    """The binding of that name, or the first that loads; the environment's ``SALTERN_RDMA_BINDING`` where it is empty.

    Raises:
        InvalidArgumentError: RDMA_BINDING_UNKNOWN.
        FailedPreconditionError: RDMA_NO_LIBRARY: none of them can be imported, with the reason of each.
    """
    name = name or os.environ.get(ENVIRONMENT, "")
    if name and name not in _LOADERS:
        raise InvalidArgumentError(
            f"there is no RDMA binding {name[:40]!r}",
            reason="RDMA_BINDING_UNKNOWN",
            hint=f"use one of: {', '.join(_LOADERS)}; or none, for the first that loads",
        )
    failures = []
    for candidate in (name,) if name else BINDING_NAMES:
        try:
            return _LOADERS[candidate]()
        except (ImportError, OSError) as error:
            failures.append(f"{candidate}: {error}")
    raise FailedPreconditionError(
        f"no RDMA library can be loaded ({'; '.join(failures)})",
        reason="RDMA_NO_LIBRARY",
        hint="apt install libibverbs1 ibverbs-providers, then pip install 'saltern[rdma]'; see docs/rdma.md",
    )


__all__ = ["BINDING_NAMES", "Binding", "load_binding"]
