"""The planner against a model of the service: whatever is there and whatever is declared, the steps lead there in an
order that the service would accept at every one of them, and then nothing is left to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

import pytest

from saltern.apply.planner import Action, Mandate, Plan, Step, plan
from saltern.apply.resources import (
    ACTIVE,
    SCOPES,
    SUSPENDED,
    TIERS,
    Declaration,
    Identity,
    Kind,
    Resource,
    Section,
    World,
    group_resource,
    invitation_resource,
    key_resource,
    membership_resource,
    namespace_resource,
    rates_resource,
    salt_resource,
    state_resource,
    tenant_resource,
    tier_resource,
)
from saltern.names import (
    ApiKeyId,
    NamespaceId,
    SharingGroupId,
    TenantId,
    namespace_name,
    sharing_group_name,
    tenant_name,
)

CAPACITY_BYTES = 100
_T = TypeVar("_T")
TENANTS = [TenantId(name) for name in ("acme", "blue", "coral", "dune")]
NAMESPACES = [NamespaceId(name) for name in ("chat", "code")]
MODEL: Mapping[str, Any] = {"model_fingerprint": "m", "block_tokens": 16, "block_bytes": 1024}


class Service:
    """What the control plane would do with each step, and what it would refuse."""

    def __init__(self, world: World) -> None:
        self.resources: dict[Identity, Resource] = dict(world.resources)
        self._revision = 0

    def world(self) -> World:
        return World(dict(self.resources))

    def apply(self, step: Step) -> None:
        wanted = step.resource
        self._revision += 1
        etag = f"etag-{self._revision}"
        match step.action:
            case Action.CREATE:
                assert wanted.identity not in self.resources, f"{wanted.name} exists"
                self._require_parents(wanted)
                self.resources[wanted.identity] = replace(wanted, etag=etag)
                self._bring_along(wanted, etag)
            case Action.CHANGE:
                before = self.resources[wanted.identity]
                assert (Kind.TENANT, tenant_name(wanted.tenant)) in self.resources
                self.resources[wanted.identity] = replace(wanted, fields={**before.fields, **wanted.fields}, etag=etag)
            case Action.DELETE:
                self._delete(wanted)
        self.check()

    def _bring_along(self, wanted: Resource, etag: str) -> None:
        """What the service makes together with what was asked for."""
        if wanted.kind is Kind.TENANT:
            for part in parts(wanted.tenant):
                self.resources[part.identity] = replace(part, etag=etag)
            fields = {"display_name": "", **wanted.fields}
            self.resources[wanted.identity] = replace(wanted, fields=fields, etag=etag)
        elif wanted.kind is Kind.NAMESPACE:
            fields = {"dram_limit_bytes": None, "ssd_limit_bytes": None, **wanted.fields}
            self.resources[wanted.identity] = replace(wanted, fields=fields, etag=etag)
        elif wanted.kind is Kind.KEY:
            fields = {"display_name": "", "expire_time_s": None, "project": "", "user": "", **wanted.fields}
            self.resources[wanted.identity] = replace(wanted, fields=fields, etag=etag)
        elif wanted.kind is Kind.GROUP:
            first = str(wanted.fields["namespace"])
            for member in (invitation_resource(wanted.tenant, wanted.name, first),
                           membership_resource(wanted.tenant, wanted.name, first)):  # fmt: skip
                self.resources[member.identity] = member

    def _require_parents(self, wanted: Resource) -> None:
        if wanted.kind is not Kind.TENANT:
            assert (Kind.TENANT, tenant_name(wanted.tenant)) in self.resources, f"{wanted.name} has no tenant"
        if wanted.kind in (Kind.GROUP, Kind.MEMBERSHIP):
            assert (Kind.NAMESPACE, str(wanted.fields["namespace"])) in self.resources
        if wanted.kind is Kind.INVITATION:
            assert (Kind.GROUP, str(wanted.fields["group"])) in self.resources
        if wanted.kind is Kind.MEMBERSHIP:
            assert (Kind.INVITATION, wanted.name) in self.resources, "accepted without an invitation"

    def _delete(self, gone: Resource) -> None:
        if gone.kind is Kind.NAMESPACE:
            members = [one for one in self.resources.values() if one.kind is Kind.MEMBERSHIP]
            assert all(one.fields["namespace"] != gone.name for one in members), "a shared namespace is not deleted"
        # Who leaves takes the invitation along, and whose invitation is taken back is no member any more.
        both = {Kind.MEMBERSHIP: Kind.INVITATION, Kind.INVITATION: Kind.MEMBERSHIP}
        for identity, one in list(self.resources.items()):
            hangs_off = one.name.startswith(f"{gone.name}/")
            if hangs_off or (one.name == gone.name and one.kind in (gone.kind, both.get(gone.kind))):
                del self.resources[identity]

    def check(self) -> None:
        """I5 after every step."""
        for tier in TIERS:
            tiers = (one for one in self.resources.values() if one.kind is Kind.QUOTA and one.fields["tier"] == tier)
            assert sum(int(one.fields["reserved_bytes"] or 0) for one in tiers) <= CAPACITY_BYTES


def parts(tenant: TenantId, etag: str = "etag-0") -> list[Resource]:
    """What every tenant has from its creation on."""
    quota = {"reserved_bytes": 0, "limit_bytes": 0, "weight": 100}
    rates = {"operations_per_s": 0, "bytes_per_s": 0, "ssd_write_bytes_per_s": 0}
    salt = {"scope": "tenant", "rotation_period_s": 0, "grace_period_s": 86400}
    return [
        state_resource(tenant, ACTIVE, etag=etag),
        *(tier_resource(tenant, tier, quota, etag=etag) for tier in TIERS),
        rates_resource(tenant, rates, etag=etag),
        salt_resource(tenant, salt, etag=etag),
    ]


def declaration(resources: Iterable[Resource], sections: Iterable[Section] = ()) -> Declaration:
    listed = {one.identity: one for one in resources}
    tenants = {one.tenant: one.origin for one in listed.values() if one.kind is Kind.TENANT}
    return Declaration(tenants, listed, frozenset(sections))


def any_declaration(random: Random) -> Declaration:
    """Any declaration of up to four tenants that the schema would let through and the capacity can hold."""

    def some(names: Sequence[_T]) -> list[_T]:
        return random.sample(names, random.randint(0, len(names)))

    resources: list[Resource] = []
    sections: set[Section] = set()
    left_bytes = dict.fromkeys(TIERS, CAPACITY_BYTES)
    for tenant in some(TENANTS):
        parent = tenant_name(tenant)
        sections |= {(kind, parent) for kind in (Kind.NAMESPACE, Kind.KEY, Kind.GROUP, Kind.MEMBERSHIP)}
        resources.append(tenant_resource(tenant, random.choice([{}, {"display_name": ""}, {"display_name": "B"}])))
        if state := random.choice(["", ACTIVE, SUSPENDED]):
            resources.append(state_resource(tenant, state))
        for tier in TIERS:  # a tier that is not declared keeps its reservation, so each is
            reserved = random.randint(0, left_bytes[tier])
            left_bytes[tier] -= reserved
            fields = {"reserved_bytes": reserved, "limit_bytes": random.randint(reserved, CAPACITY_BYTES)}
            resources.append(tier_resource(tenant, tier, fields))
        if random.random() < 0.5:
            resources.append(rates_resource(tenant, {"bytes_per_s": random.randint(0, 3)}))
        if random.random() < 0.5:
            resources.append(salt_resource(tenant, {"scope": random.choice(SCOPES)}))
        for namespace in some(NAMESPACES):
            limits = random.choice([{}, {"dram_limit_bytes": None}, {"dram_limit_bytes": 9}])
            resources.append(namespace_resource(tenant, namespace, {**MODEL, **limits}))
        resources += (key_resource(tenant, ApiKeyId(key), {"role": "writer"}) for key in some(["ci", "web"]))
    places = [one for one in resources if one.kind is Kind.NAMESPACE]
    for first in some(places):
        group_id = SharingGroupId(f"of-{first.name.rpartition('/')[2]}")
        group = sharing_group_name(first.tenant, group_id)
        resources.append(group_resource(first.tenant, group_id, first.name))
        sections.add((Kind.INVITATION, group))
        invited = [first, *(one for one in some(places) if one is not first)]
        resources += (invitation_resource(first.tenant, group, one.name) for one in invited)
        accepting = [one for one in invited if one is first or random.random() < 0.6]
        resources += (membership_resource(one.tenant, group, one.name) for one in accepting)
    return declaration(resources, sections)


def carry_out(service: Service, declared: Declaration, mandate: Mandate, seed: int = 0) -> Plan:
    planned = plan(declared, service.world(), mandate)
    assert not planned.conflicts and not planned.waiting, f"seed {seed}"
    for step in planned.steps:
        try:
            service.apply(step)
        except (AssertionError, KeyError) as refused:
            refused.add_note(f"seed {seed}: {step.action} {step.resource.name}")
            raise
    return planned


SEEDS = range(400)
EVERYTHING = Mandate(prune=True, prune_tenants=True)


@pytest.mark.parametrize("seeds", [SEEDS[:200], SEEDS[200:]], ids=str)
def test_i5_any_declaration_is_reached_from_any_other_without_a_refused_step(seeds: range) -> None:
    for seed in seeds:
        random, service = Random(seed), Service(World({}))
        for _ in range(3):
            declared = any_declaration(random)
            carry_out(service, declared, EVERYTHING, seed)
            again = plan(declared, service.world(), EVERYTHING)
            assert not again.steps and not again.not_declared, f"seed {seed}"
            assert again.unchanged == len(declared.resources), f"seed {seed}"


def test_an_interrupted_run_is_finished_by_the_next() -> None:
    for seed in SEEDS:
        random, service = Random(seed), Service(World({}))
        carry_out(service, any_declaration(random), EVERYTHING, seed)
        declared = any_declaration(random)
        steps = plan(declared, service.world(), EVERYTHING).steps
        for step in steps[: random.randint(0, len(steps))]:
            service.apply(step)
        carry_out(service, declared, EVERYTHING, seed)
        assert not plan(declared, service.world(), EVERYTHING).steps, f"seed {seed}"


def test_without_pruning_nothing_is_deleted() -> None:
    for seed in SEEDS:
        random, service = Random(seed), Service(World({}))
        carry_out(service, any_declaration(random), EVERYTHING, seed)
        declared = any_declaration(random)
        planned = plan(declared, service.world(), Mandate())
        assert planned.count(Action.DELETE) == 0, f"seed {seed}"
        kept = {one.identity for one in planned.not_declared}
        assert kept <= service.resources.keys() - declared.resources.keys(), f"seed {seed}"


def test_reservations_are_lowered_before_others_are_raised() -> None:
    acme, blue = TENANTS[:2]
    service = Service(World({}))
    full, none = {"reserved_bytes": 100, "limit_bytes": 100}, {"reserved_bytes": 0, "limit_bytes": 100}
    crossed = [
        tenant_resource(acme, {}), tier_resource(acme, "dram", full), tier_resource(acme, "ssd", none),
        tenant_resource(blue, {}), tier_resource(blue, "dram", none), tier_resource(blue, "ssd", full),
    ]  # fmt: skip
    carry_out(service, declaration(crossed), Mandate())
    swapped = [
        replace(one, fields=full if one.fields["reserved_bytes"] == 0 else none) for one in crossed if one.fields
    ]
    swapped = [replace(one, fields={**one.fields, "tier": one.name.rpartition("/")[2]}) for one in swapped]
    planned = carry_out(service, declaration([*crossed[::3], *swapped]), Mandate())
    assert [step.warning != "" for step in planned.steps] == [True, True, False, False]


def test_what_a_file_does_not_mention_keeps_its_value() -> None:
    service = Service(World({}))
    acme = TENANTS[0]
    whole = {"reserved_bytes": 5, "limit_bytes": 50, "weight": 300}
    carry_out(service, declaration([tenant_resource(acme, {}), tier_resource(acme, "dram", whole)]), Mandate())
    planned = carry_out(
        service, declaration([tenant_resource(acme, {}), tier_resource(acme, "dram", {"limit_bytes": 60})]), Mandate()
    )
    (step,) = planned.steps
    assert step.resource.fields == {"tier": "dram", "reserved_bytes": 5, "limit_bytes": 60, "weight": 300}
    assert [change.field for change in step.changes] == ["limit_bytes"]
    assert step.resource.etag, "a change carries the etag of what was read"


@pytest.mark.parametrize(
    ("before", "after", "warns"),
    [
        (salt_resource(TENANTS[0], {"scope": "tenant"}), salt_resource(TENANTS[0], {"scope": "user"}), True),
        (salt_resource(TENANTS[0], {"grace_period_s": 9}), salt_resource(TENANTS[0], {"grace_period_s": 8}), True),
        (salt_resource(TENANTS[0], {"grace_period_s": 8}), salt_resource(TENANTS[0], {"grace_period_s": 9}), False),
        (rates_resource(TENANTS[0], {"bytes_per_s": 0}), rates_resource(TENANTS[0], {"bytes_per_s": 9}), True),
        (rates_resource(TENANTS[0], {"bytes_per_s": 9}), rates_resource(TENANTS[0], {"bytes_per_s": 0}), False),
        (state_resource(TENANTS[0], ACTIVE), state_resource(TENANTS[0], SUSPENDED), True),
        (state_resource(TENANTS[0], SUSPENDED), state_resource(TENANTS[0], ACTIVE), False),
        (
            namespace_resource(TENANTS[0], NAMESPACES[0], {"dram_limit_bytes": None}),
            namespace_resource(TENANTS[0], NAMESPACES[0], {"dram_limit_bytes": 9}),
            True,
        ),
        (
            namespace_resource(TENANTS[0], NAMESPACES[0], {"dram_limit_bytes": 9}),
            namespace_resource(TENANTS[0], NAMESPACES[0], {"dram_limit_bytes": None}),
            False,
        ),
    ],
)
def test_a_step_says_what_somebody_may_lose(before: Resource, after: Resource, warns: bool) -> None:
    (step,) = plan(declaration([after]), World.of([replace(before, etag="e")]), Mandate()).steps
    assert bool(step.warning) is warns


def test_what_never_changes_is_a_conflict_and_so_is_what_only_the_platform_may() -> None:
    acme = TENANTS[0]
    there = World.of([
        namespace_resource(acme, NAMESPACES[0], MODEL, etag="e"),
        key_resource(acme, ApiKeyId("ci"), {"role": "writer"}, etag="e"),
        tier_resource(acme, "dram", {"limit_bytes": 1}, etag="e"),
    ])  # fmt: skip
    declared = declaration([
        namespace_resource(acme, NAMESPACES[0], {"block_bytes": 2048}, origin="f:1:1"),
        key_resource(acme, ApiKeyId("ci"), {"role": "reader"}, origin="f:2:1"),
        tier_resource(acme, "dram", {"limit_bytes": 2}, origin="f:3:1"),
        namespace_resource(acme, NAMESPACES[1], {}, origin="f:4:1"),
    ])  # fmt: skip
    planned = plan(declared, there, Mandate(tenant=acme))
    assert not planned.steps
    assert [conflict.resource.origin for conflict in planned.conflicts] == ["f:1:1", "f:2:1", "f:3:1", "f:4:1"]
    assert all(conflict.hint for conflict in planned.conflicts)


def test_the_key_in_use_is_never_pruned() -> None:
    acme = TENANTS[0]
    keys = [key_resource(acme, ApiKeyId(name), {"role": "tenant-admin"}, lookup=name * 8) for name in ("ab", "cd")]
    declared = declaration([tenant_resource(acme, {})], [(Kind.KEY, tenant_name(acme))])
    world = World.of([tenant_resource(acme, {}), *keys])
    planned = plan(declared, world, Mandate(own_lookup="ab" * 8, prune=True))
    assert [step.resource.name for step in planned.steps] == ["tenants/acme/apiKeys/cd"]


def test_an_acceptance_waits_for_its_invitation() -> None:
    blue, group = TENANTS[1], sharing_group_name(TENANTS[0], SharingGroupId("research"))
    member = membership_resource(blue, group, namespace_name(blue, NAMESPACES[0]))
    planned = plan(declaration([member]), World({}), Mandate())
    assert not planned.steps and "not invited" in planned.waiting[0]
    invitation = invitation_resource(TENANTS[0], group, namespace_name(blue, NAMESPACES[0]))
    planned = plan(declaration([member]), World.of([invitation]), Mandate())
    assert [step.resource.kind for step in planned.steps] == [Kind.MEMBERSHIP]
    assert "reads what the namespace stores" in planned.steps[0].warning
