"""What clients do in a world of two tiers."""

from __future__ import annotations

from dataplane.core.entry import PutRefused
from saltern.wire import checksum
from tests.sim.disk import Value
from tests.sim.two_tier_shell import Shell
from tests.sim.two_tier_values import Reading, Writing, in_order, payload, short


class Clients(Shell):
    """Puts, gets and deletes, some of them slow."""

    def put(self) -> bool:
        """A put from beginning to end."""
        writing = self._start_put()
        if writing is not None:
            self._commit(writing)
        return True

    def begin_put(self) -> bool:
        writing = self._start_put() if len(self.writings) < 4 else None
        if writing is not None:
            self.writings.append(writing)
        return writing is not None

    def finish_put(self) -> bool:
        if not self.writings:
            return False
        writing = self.writings.pop(self.rng.randrange(len(self.writings)))
        if self.rng.random() < 0.15:
            self.core.put_abort(writing.ticket)
            self.say(f"a client dies while it puts {short(writing.value.key)}")
            self.done["died while putting"] += 1
        else:
            self._commit(writing)
        return True

    def _start_put(self) -> Writing | None:
        partition, key = self._any_partition(), self.rng.choice(self.keys)
        if self.unread and self.rng.random() < 0.2:
            partition, key = self.unread.pop()
        self.numbers += 1
        size_bytes = self.rng.choice(self.sizes_bytes)
        value = Value(self.numbers, partition, key, payload(partition, key, self.numbers, size_bytes))
        before = self.in_dram()
        outcome = self.core.put_start(partition, key, size_bytes, self.now_ns)
        told = f"{partition.tenant}@{partition.epoch} puts {short(key)} of {size_bytes} B (#{value.number})"
        if isinstance(outcome, PutRefused):
            assert self.in_dram() == before, "I6: a put that was refused evicted something"
            self.say(f"{told}: {outcome.error.reason}")
            self.done[f"refused as {outcome.error.reason}"] += 1
            return None
        assert not self.on_either(partition, key), "I6: a put over an entry that is there was admitted"
        self.say(f"{told}: admitted at {outcome.offset}")
        self.arena.view(outcome.offset, size_bytes)[:] = value.payload
        replaced = self.truth.current.get((partition, key))
        if replaced is not None and self.tier.is_writable:  # lost from both tiers, and perhaps still on disk
            self.truth.graves.setdefault((partition, key), set()).add(replaced.number)
        return Writing(outcome, value)

    def _commit(self, writing: Writing) -> None:
        value = writing.value
        refused = self.core.put_commit(writing.ticket, checksum(value.payload), self.now_ns)
        if refused is None:
            self.truth.current[value.partition, value.key] = value
            self.done["stored"] += 1
        self.say(f"#{value.number} is {'stored' if refused is None else refused.error.reason}")

    def get(self) -> bool:
        """Read some keys: what is in DRAM now, what is on SSD once its read has been done."""
        partition = self._any_partition()
        wanted = list(dict.fromkeys(self.rng.choices(self.keys, k=self.rng.randint(1, 4))))
        pins = self.core.get_start(partition, wanted, self.now_ns, counts_misses=False)
        begun = 0
        for key, pin in zip(wanted, pins, strict=True):
            if pin is not None:
                self._verify(partition, key, pin)
                self.pins.append(pin)
                continue
            promotion = self.core.promote_start(partition, key, self.now_ns)
            if promotion is not None:
                self.readings.append(Reading(promotion.read, promotion=promotion))
                begun += 1
        self.say(
            f"{partition.tenant} gets {len(wanted)} keys: {len(wanted) - pins.count(None)} in DRAM, {begun} on SSD"
        )
        return True

    def release(self) -> bool:
        """A reader ends."""
        if not self.pins:
            return False
        self.core.get_end([self.pins.pop(self.rng.randrange(len(self.pins)))])
        return True

    def delete(self) -> bool:
        """Any key; more often one that is on SSD, or on its way from there."""
        partition, key = self._any_partition(), self.rng.choice(self.keys)
        reading = [one.promotion.ticket.entry for one in self.readings if one.promotion is not None]
        on_ssd = sorted(self._on_disk(), key=in_order)
        if self.unread and self.rng.random() < 0.5:
            partition, key = self.unread.pop()
        elif reading and self.rng.random() < 0.5:
            entry = self.rng.choice(reading)
            partition, key = entry.index.partition, entry.key
        elif on_ssd and self.rng.random() < 0.7:
            partition, key = self.rng.choice(on_ssd)
        value = self.truth.current.get((partition, key))
        deleted = self.core.delete(partition, [key])
        self.collect()
        self.losses.add((partition, key))
        assert not self.on_either(partition, key), "I12: deleted and still found"
        if self.is_open(partition) and value is not None:
            del self.truth.current[partition, key]
            self.truth.graves.setdefault((partition, key), set()).add(value.number)
        self.say(f"{partition.tenant} deletes {short(key)}: {deleted} there")
        return True
