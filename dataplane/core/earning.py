"""How much of a reservation is protected where reservations are *earning*: what keeps the promised hits (I5).

Under this rule a reservation promises a hit rate, not idle bytes: no tenant shall be served worse than by a cache of
its own of the size of its reservation, managed by LRU. So the node keeps account of both. A sample of the tenant's keys
runs through such a *solo cache*; each hit of the real cache is a credit, each hit that the solo cache has is a debit,
in bytes. While the tenant is ahead by a fifth of its reservation it lends all of it; as the lead shrinks, protection
comes back in proportion, and at a lead of nothing it is complete. A tenant that the solo cache would not serve either
(a scan) has no use for its reservation and lends it, and its entries are the first to go.

A lead is never more than that fifth: what was earned long ago buys nobody the right to evict this tenant now.

The sample is SHARDS (Waldspurger et al., FAST 2015): keys chosen by hash, capacity scaled alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from dataplane.core.entry import Pin
from saltern.keys import BlockKey

#: One key in so many is sampled. At 16 the sample of a reservation of 6,000 entries errs by 7%, more than the lead that
#: it has to tell.
SAMPLE_ONE_IN: Final = 2
#: Byte of a key that chooses the sample: one that the ghosts (:mod:`dataplane.core.ghosts`) do not look at.
_SAMPLE_BYTE: Final = 15
#: The lead at which a tenant lends its whole reservation, as a share of it: one part in so many.
_LEAD_PARTS: Final = 5
#: A tenant earns if at least one in so many of its keys hits, in the real cache or in the solo one.
_EARNS_ONE_IN: Final = 50
#: Keys over which earning is measured; the counts are halved when they reach it.
_WINDOW_KEYS: Final = 8_192
#: Lookups' misses that are remembered, the newest ones: more than are on their way to be stored at a time.
_NOTED_MAX: Final = 4_096


class EarningAccount:
    """Real against solo hits of one tenant on one tier.

    Constant time for each sampled key; in memory the index of half a solo cache and ``_NOTED_MAX`` keys. What is
    protected changes only in :meth:`looked_up`, :meth:`not_found` and :meth:`set_reserved`.
    """

    __slots__ = ("_hits", "_keys", "_lead_bytes", "_noted", "_reserved_bytes", "_solo", "_solo_bytes", "_solo_hits")

    def __init__(self) -> None:
        self._reserved_bytes = 0
        self._lead_bytes = 0
        self._solo: OrderedDict[BlockKey, int] = OrderedDict()
        self._solo_bytes = 0
        self._noted: OrderedDict[BlockKey, None] = OrderedDict()
        self._keys = self._solo_hits = 0
        self._hits = _WINDOW_KEYS // _EARNS_ONE_IN  # nobody is judged by a cold start

    @property
    def protected_bytes(self) -> int:
        """Nobody else takes this tenant's entries while it uses no more than this; between 0 and the reservation."""
        if not self.earns:
            return 0
        missing_bytes = self._lead_max_bytes - self._lead_bytes
        return min(self._reserved_bytes, missing_bytes * _LEAD_PARTS)

    @property
    def earns(self) -> bool:
        """Whether caching serves this tenant at all; True until a window of keys says otherwise."""
        return max(self._hits, self._solo_hits) * _EARNS_ONE_IN >= self._keys

    def set_reserved(self, reserved_bytes: int) -> None:
        """Follow a change of quota; the solo cache shrinks at once and grows as the tenant goes on."""
        self._reserved_bytes = reserved_bytes
        self._lead_bytes = max(-reserved_bytes, min(self._lead_bytes, self._lead_max_bytes))
        self._shrink()

    def looked_up(self, keys: Sequence[BlockKey], pins: Sequence[Pin | None]) -> None:
        """A batch was read from the real cache: ``pins`` are its hits, None for a miss.

        A hit behind the first gap counts as none: it saves nobody a prefill. A miss that a lookup has noted before
        (:meth:`not_found`) is the same one.
        """
        useful = pins.index(None) if None in pins else len(pins)
        for position in range(len(keys) - 1, -1, -1):  # last key first, as the real cache is touched
            key, pin = keys[position], pins[position]
            if is_sampled(key) and not (self._take_note(key) and pin is None):
                held_bytes = 0 if pin is None else pin.entry.extent_bytes
                self._looked_up(key, held_bytes, held_bytes if position < useful else 0)
        self._asked(len(keys), useful)

    def not_found(self, keys: Sequence[BlockKey]) -> None:
        """A lookup has told the client that these are on no tier, so that it will not read but store them.

        Each is one miss, however often it is looked up until it is stored or read. It is held against whether the
        tenant earns only once it is stored here: a client asks two nodes for what one of them has.
        """
        for key in reversed(keys):
            if is_sampled(key) and key not in self._noted:
                self._noted[key] = None
                self._looked_up(key, 0, 0)
        while len(self._noted) > _NOTED_MAX:
            self._noted.popitem(last=False)

    def stored(self, key: BlockKey, extent_bytes: int) -> None:
        """A put was committed."""
        if is_sampled(key):
            if self._take_note(key):
                self._asked(SAMPLE_ONE_IN, 0)
            self._hold(key, extent_bytes)

    def refreshed(self, key: BlockKey) -> None:
        """An entry was touched after its batch was put."""
        if is_sampled(key) and key in self._solo:
            self._solo.move_to_end(key)

    def deleted(self, key: BlockKey) -> None:
        """The owner deleted an entry: the solo cache would not have it any more either."""
        if is_sampled(key):
            self._solo_bytes -= self._solo.pop(key, 0)

    @property
    def _lead_max_bytes(self) -> int:
        return self._reserved_bytes // _LEAD_PARTS

    def _take_note(self, key: BlockKey) -> bool:
        """Whether a lookup has missed ``key``; it is not remembered any longer."""
        if key not in self._noted:
            return False
        del self._noted[key]
        return True

    def _asked(self, keys: int, hits: int) -> None:
        self._keys += keys
        self._hits += hits
        if self._keys >= _WINDOW_KEYS:
            self._keys >>= 1
            self._hits >>= 1
            self._solo_hits >>= 1

    def _looked_up(self, key: BlockKey, held_bytes: int, useful_bytes: int) -> None:
        """``held_bytes`` are what the real cache holds of the key, ``useful_bytes`` what of it spares work."""
        solo_bytes = self._solo.get(key, 0)
        if solo_bytes:
            self._solo.move_to_end(key)
            self._solo_hits += SAMPLE_ONE_IN
        elif held_bytes:
            self._hold(key, held_bytes)  # alone, the tenant would have had to put it again
        lead_bytes = self._lead_bytes + (useful_bytes - solo_bytes) * SAMPLE_ONE_IN
        self._lead_bytes = max(-self._reserved_bytes, min(lead_bytes, self._lead_max_bytes))

    def _hold(self, key: BlockKey, extent_bytes: int) -> None:
        self._solo_bytes += extent_bytes - self._solo.pop(key, 0)
        self._solo[key] = extent_bytes
        self._shrink()

    def _shrink(self) -> None:
        while self._solo_bytes * SAMPLE_ONE_IN > self._reserved_bytes:
            self._solo_bytes -= self._solo.popitem(last=False)[1]


def is_sampled(key: BlockKey) -> bool:
    """Whether the solo caches follow ``key``; the same on every node and in every run."""
    return key[_SAMPLE_BYTE] % SAMPLE_ONE_IN == 0
