"""What administrators do in a world of two tiers."""

from __future__ import annotations

from saltern.names import TenantId
from tenants.policy import NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import Tier, TierQuota
from tests.sim.two_tier_shell import Shell
from tests.sim.two_tier_values import NS, Rules


class Administration(Shell):
    """Quotas, epochs, namespaces and tenants that change."""

    def push(self) -> None:
        """Apply the rules as they are."""
        self.version += 1
        tenants = {
            tenant: TenantPolicy(
                TenantState.ACTIVE,
                {Tier.DRAM: rules.dram, Tier.SSD: rules.ssd},
                {NS: NamespacePolicy(rules.uid, 16_384, rules.epochs, tier_limits=dict(rules.namespace_limits))},
            )
            for tenant, rules in self.rules.items()
        }
        self.core.apply_policy(NodePolicy(self.version, tenants), self.now_ns)
        self.collect()
        for partition, key in list(self.truth.current):
            if not self.is_open(partition):
                del self.truth.current[partition, key]
                self.losses.add((partition, key))

    def change_quota(self) -> bool:
        tenant = self.rng.choice(self.names)
        if tenant not in self.rules:
            return False
        drawn, rules = self._draw_rules(tenant), self.rules[tenant]
        rules.dram, rules.ssd = drawn.dram, drawn.ssd
        rules.namespace_limits = drawn.namespace_limits
        self.say(
            f"{tenant} now has {rules.dram} and {rules.ssd}, its namespace {rules.namespace_limits or 'no limits'}"
        )
        self.push()
        return True

    def rotate_epoch(self) -> bool:
        rules = self.rules.get(self.rng.choice(self.names))
        if rules is None:
            return False
        rules.epochs = (*rules.epochs, rules.epochs[-1] + 1)[-3:]
        self.say("an epoch begins")
        self.push()
        return True

    def retire_epoch(self) -> bool:
        rules = self.rules.get(self.rng.choice(self.names))
        if rules is None or len(rules.epochs) == 1:
            return False
        rules.epochs = rules.epochs[-1:]
        self.say("older epochs end")
        self.push()
        return True

    def recreate_namespace(self) -> bool:
        rules = self.rules.get(self.rng.choice(self.names))
        if rules is None:
            return False
        self.uids += 1
        rules.uid, rules.epochs = f"u{self.uids}", (1,)
        self.say("a namespace is deleted and made anew")
        self.push()
        return True

    def delete_or_create_tenant(self) -> bool:
        tenant = self.rng.choice(self.names)
        if tenant in self.rules and self.rng.random() < 0.6:
            return False
        if tenant in self.rules:
            del self.rules[tenant]
        else:
            self.rules[tenant] = self._draw_rules()
        self.say(f"{tenant} is {'made' if tenant in self.rules else 'deleted'}")
        self.push()
        return True

    def _draw_rules(self, tenant: TenantId | None = None) -> Rules:
        """Any quotas whose reservations both tiers can still promise."""
        self.uids += 1
        others = [rules for name, rules in self.rules.items() if name != tenant]

        def draw(capacity_bytes: int, reserved_by_others: int) -> TierQuota:
            limit_bytes = int(self.rng.choice([0, 0.25, 0.4, 0.6, 0.6, 1, 1, 1.5]) * capacity_bytes)
            wanted_bytes = int(self.rng.choice([0, 0.1, 0.3]) * capacity_bytes)
            reserved_bytes = min(limit_bytes, wanted_bytes, max(capacity_bytes - reserved_by_others, 0))
            return TierQuota(reserved_bytes, limit_bytes, self.rng.choice([1, 100, 100, 1000]))

        return Rules(
            draw(self.dram_bytes, sum(rules.dram.reserved_bytes for rules in others)),
            draw(self.ssd_bytes, sum(rules.ssd.reserved_bytes for rules in others)),
            f"u{self.uids}",
            namespace_limits=self._draw_limits(),
        )

    def _draw_limits(self) -> dict[Tier, int]:
        """Limits of a namespace on either tier, both or none; not always in whole granules or blocks."""
        rng = self.limits_rng
        if rng is None:
            return {}
        capacities = {Tier.DRAM: self.dram_bytes, Tier.SSD: self.ssd_bytes}
        shares = {tier: rng.choice([None, 0, 0.15, 0.25, 0.3, 0.45, 1]) for tier in capacities}
        return {tier: int(share * capacities[tier]) for tier, share in shares.items() if share is not None}
