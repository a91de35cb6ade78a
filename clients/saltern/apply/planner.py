"""What must be done so that what is there becomes what is declared: values in, steps out, no I/O.

The order of the steps is what makes them safe to carry out one by one, and to stop after any of them:

1. sharing ends and what is pruned goes, tenants last, which frees what they had reserved;
2. reservations are lowered before others are raised, so that no step promises more than the nodes have (I5);
3. tenants come before what hangs off them, namespaces before groups, invitations before acceptances;
4. keys are made last: nobody works in a tenant that is half set up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum, unique
from typing import Final

from saltern.apply.resources import ACTIVE, SUSPENDED, Declaration, Identity, Kind, Resource, Value, World
from saltern.names import TenantId, parse_sharing_group_name


@unique
class Action(StrEnum):
    CREATE = "create"
    CHANGE = "change"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class FieldChange:
    field: str
    before: Value
    after: Value


@dataclass(frozen=True, slots=True)
class Step:
    """One call of the control plane.

    Attributes:
        resource: as it is to be, with what the file says nothing about as it is now; of a deletion as it is now.
            Its etag is the one that was read.
        changes: of a change or creation, field by field; empty for a deletion.
        warning: what somebody may lose by it, in words; empty where nobody loses anything.
        origin: where it is declared; empty for a deletion.
    """

    action: Action
    resource: Resource
    changes: tuple[FieldChange, ...] = ()
    warning: str = ""

    @property
    def origin(self) -> str:
        return self.resource.origin if self.action is not Action.DELETE else ""


@dataclass(frozen=True, slots=True)
class Conflict:
    """What is declared and cannot be had; nothing is done while there is one."""

    resource: Resource
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Attributes:
    steps: in the order in which they must be done.
    unchanged: how many declared resources are as they should be.
    not_declared: what is there and in no file, in the lists that files write out; left alone without pruning.
    waiting: what is declared and depends on somebody else, in words.
    """

    steps: tuple[Step, ...]
    conflicts: tuple[Conflict, ...] = ()
    unchanged: int = 0
    not_declared: tuple[Resource, ...] = ()
    waiting: tuple[str, ...] = ()

    def count(self, action: Action) -> int:
        return sum(step.action is action for step in self.steps)

    @property
    def new_keys(self) -> tuple[Resource, ...]:
        """The API keys that it makes, each with a secret that somebody must be given."""
        return tuple(
            step.resource for step in self.steps if step.action is Action.CREATE and step.resource.kind is Kind.KEY
        )


@dataclass(frozen=True, slots=True)
class Mandate:
    """Who plans, and how far they go.

    Attributes:
        tenant: that of the caller's key; None for the platform's.
        own_lookup: which API key the caller uses: that one is never deleted.
        prune: delete what is in no file, inside the lists that files write out.
        prune_tenants: delete tenants that no file names.
    """

    tenant: TenantId | None = None
    own_lookup: str = ""
    prune: bool = False
    prune_tenants: bool = False


#: Fixed for the life of a resource, and what to do instead.
_FIXED: Final[Mapping[Kind, tuple[frozenset[str], str]]] = {
    Kind.NAMESPACE: (
        frozenset({"model_fingerprint", "block_tokens", "block_bytes"}),
        "declare another namespace; this one can be deleted when nobody uses it any more",
    ),
    Kind.KEY: (
        frozenset({"role", "display_name", "expire_time_s", "project", "user"}),
        "declare a key with another name, or use `saltern key rotate --expires-in` for another expiry",
    ),
}
_OF_THE_PLATFORM: Final = frozenset({Kind.TENANT, Kind.STATE, Kind.QUOTA, Kind.RATES})
#: What a tenant has from its creation on, where that decides whether a step is needed.
_AT_CREATION: Final[Mapping[Kind, Mapping[str, Value]]] = {Kind.STATE: {"state": ACTIVE}}
#: Part of a tenant from its creation on: changed, never created.
_PARTS: Final = frozenset({Kind.STATE, Kind.QUOTA, Kind.RATES, Kind.SALT})
#: Only names what a resource is about, or how it began: never compared.
_NOT_COMPARED: Final = frozenset({"tier", "group", "namespace"})
_DELETE_ORDER: Final = (Kind.MEMBERSHIP, Kind.INVITATION, Kind.KEY, Kind.GROUP, Kind.NAMESPACE, Kind.TENANT)


def plan(declared: Declaration, actual: World, mandate: Mandate) -> Plan:
    """Compare; the same arguments give the same plan."""
    extra = tuple(_not_declared(declared, actual, mandate))
    pruned = tuple(resource for resource in extra if _prunes(mandate, resource))
    # Compared with what pruning leaves: who leaves a group that its owner invites to is invited again.
    left = _without(actual, pruned)
    steps = [Step(Action.DELETE, resource, warning=_loss_of(resource)) for resource in pruned]
    conflicts: list[Conflict] = []
    waiting: list[str] = []
    unchanged = 0
    for wanted in declared.resources.values():
        found = left.resources.get(wanted.identity)
        if _comes_with_its_group(wanted, declared, left):
            continue
        if wanted.kind is Kind.MEMBERSHIP and found is None and not _is_invited(wanted, declared, left):
            group, namespace = wanted.fields["group"], wanted.fields["namespace"]
            waiting.append(f"{namespace} is not invited to {group} yet: apply again when its owner has done so")
            continue
        step = _step_for(wanted, found)
        if step is None:
            unchanged += 1
        elif conflict := _conflict_of(step, mandate):
            conflicts.append(conflict)
        else:
            steps.append(step)
    ordered = tuple(sorted(steps, key=_order))  # sorted() is stable: inside a place the order of the files stays
    kept = tuple(resource for resource in extra if not _prunes(mandate, resource))
    return Plan(ordered, tuple(conflicts), unchanged, kept, tuple(waiting))


def _without(world: World, pruned: Iterable[Resource]) -> World:
    """What is left after pruning, with what goes along: members of groups, and everything below what is deleted."""
    names = {resource.name for resource in pruned}
    if not names:
        return world
    return World({
        identity: resource
        for identity, resource in world.resources.items()
        if resource.name not in names and names.isdisjoint(_above(resource.name))
    })  # fmt: skip


def _above(name: str) -> Iterator[str]:
    """The names that a name continues."""
    parts = name.split("/")
    return ("/".join(parts[:length]) for length in range(2, len(parts)))


def _step_for(wanted: Resource, found: Resource | None) -> Step | None:
    """What makes ``found`` (None: nothing there) as ``wanted``; None if it is."""
    before = _AT_CREATION.get(wanted.kind, {}) if found is None else found.fields
    changes = tuple(
        FieldChange(name, before.get(name), value)
        for name, value in wanted.fields.items()
        if name not in _NOT_COMPARED and (name not in before or before[name] != value)
    )
    if found is None and wanted.kind not in _PARTS:
        return Step(Action.CREATE, wanted, changes, _warning(wanted, changes))
    if not changes:
        return None
    merged = {**(found.fields if found else {}), **wanted.fields}
    etag = found.etag if found else ""
    return Step(Action.CHANGE, replace(wanted, fields=merged, etag=etag), changes, _warning(wanted, changes))


def _conflict_of(step: Step, mandate: Mandate) -> Conflict | None:
    resource = step.resource
    fixed, instead = _FIXED.get(resource.kind, (frozenset[str](), ""))
    if step.action is Action.CHANGE and (broken := [change for change in step.changes if change.field in fixed]):
        shown = ", ".join(f"{change.field} {change.before!r} -> {change.after!r}" for change in broken)
        return Conflict(resource, f"{resource.name} is there, and this of it never changes: {shown}", instead)
    if mandate.tenant is not None and resource.kind in _OF_THE_PLATFORM:
        return Conflict(
            resource,
            f"{resource.name} is not as declared, and only a platform administrator changes it",
            "take it out of the file, or apply with a platform administrator's key",
        )
    if resource.kind is Kind.NAMESPACE and step.action is Action.CREATE and (missing := fixed - resource.fields.keys()):
        return Conflict(
            resource,
            f"{resource.name} is not there, and to be made it needs: {', '.join(sorted(missing))}",
            "give modelFingerprint, blockTokens and blockBytes",
        )
    if resource.kind is Kind.KEY and step.action is Action.CREATE and "role" not in resource.fields:
        return Conflict(resource, f"{resource.name} is not there, and to be made it needs a role", "give its role")
    return None


def _is_invited(membership: Resource, declared: Declaration, actual: World) -> bool:
    """Whether an invitation is there, or will be by the time of the acceptance."""
    invitation: Identity = (Kind.INVITATION, membership.name)
    return invitation in actual.resources or invitation in declared.resources


def _comes_with_its_group(wanted: Resource, declared: Declaration, actual: World) -> bool:
    """Whether it is the first member of a group that is still to be made, which is in it from the start."""
    if wanted.kind not in (Kind.INVITATION, Kind.MEMBERSHIP):
        return False
    identity: Identity = (Kind.GROUP, str(wanted.fields["group"]))
    group = declared.resources.get(identity)
    return (
        group is not None
        and identity not in actual.resources
        and group.fields["namespace"] == wanted.fields["namespace"]
    )


def _not_declared(declared: Declaration, actual: World, mandate: Mandate) -> Iterator[Resource]:
    for identity, found in actual.resources.items():
        if identity in declared.resources or (found.lookup and found.lookup == mandate.own_lookup):
            continue
        if found.kind is Kind.TENANT:
            if mandate.prune_tenants and found.tenant not in declared.tenants:
                yield found
        elif (found.kind, found.parent) in declared.sections and not _is_at_home(found):
            yield found


def _is_at_home(resource: Resource) -> bool:
    """A membership in a group of the same tenant: that goes with its invitation, or with the group."""
    if resource.kind is not Kind.MEMBERSHIP:
        return False
    return parse_sharing_group_name(str(resource.fields["group"]))[0] == resource.tenant


def _prunes(mandate: Mandate, resource: Resource) -> bool:
    return mandate.prune_tenants if resource.kind is Kind.TENANT else mandate.prune


def _order(step: Step) -> tuple[int, int]:
    kind = step.resource.kind
    if step.action is Action.DELETE:
        return 0, _DELETE_ORDER.index(kind)
    if kind is Kind.STATE:
        # Whoever is to stop stops first; whoever may work again finds everything ready.
        return (1, 0) if step.resource.fields["state"] == SUSPENDED and not _is_new(step) else (9, 0)
    if kind is Kind.QUOTA and not _is_new(step) and not _raises_reservation(step):
        return 2, 0
    places = (Kind.TENANT, Kind.QUOTA, Kind.RATES, Kind.SALT, Kind.NAMESPACE, Kind.GROUP)
    later = (Kind.INVITATION, Kind.MEMBERSHIP, Kind.KEY)
    return (3, places.index(kind)) if kind in places else (4, later.index(kind))


def _is_new(step: Step) -> bool:
    """Whether the tenant of a part is made by the same plan: then nothing of the part was read."""
    return not step.resource.etag


def _raises_reservation(step: Step) -> bool:
    return any(
        change.field == "reserved_bytes" and _number(change.after) > _number(change.before) for change in step.changes
    )


def _warning(wanted: Resource, changes: Iterable[FieldChange]) -> str:
    """What somebody may lose by these changes; empty for nothing."""
    by_field = {change.field: change for change in changes}
    match wanted.kind:
        case Kind.STATE if wanted.fields["state"] == SUSPENDED:
            return "its clients lose the cache until it is active again"
        case Kind.QUOTA if any(
            by_field[name].before is not None and _number(by_field[name].after) < _number(by_field[name].before)
            for name in ("reserved_bytes", "limit_bytes")
            if name in by_field
        ):
            return "lowers what it is promised or may hold"
        case Kind.RATES if any(
            change.before is not None and _as_limit(change.after) < _as_limit(change.before) for change in changes
        ):
            return "lowers how fast it may be"
        case Kind.NAMESPACE if any(
            name in by_field and _lowers_limit(by_field[name], created="block_bytes" in by_field)
            for name in ("dram_limit_bytes", "ssd_limit_bytes")
        ):
            return "lowers what it may hold: nodes evict down to it"
        case Kind.SALT if "scope" in by_field and by_field["scope"].before is not None:
            return "nothing that is stored now is found again"
        case Kind.SALT if (grace := by_field.get("grace_period_s")) and _number(grace.after) < _number(grace.before):
            return "old epochs are readable for a shorter time"
        case Kind.MEMBERSHIP:
            return "every member of the group reads what the namespace stores in it"
        case _:
            return ""


def _lowers_limit(change: FieldChange, *, created: bool) -> bool:
    """None is no limit at all."""
    if created or change.after is None:
        return False
    return change.before is None or _number(change.after) < _number(change.before)


def _loss_of(resource: Resource) -> str:
    match resource.kind:
        case Kind.TENANT:
            return "with all its namespaces, keys and cached entries"
        case Kind.NAMESPACE:
            return "with all its cached entries"
        case Kind.KEY:
            return "whoever uses it loses access at once"
        case _:
            return "what was shared is dropped, and the group has another salt at once"


def _number(value: Value) -> int:
    return value if isinstance(value, int) else 0


def _as_limit(value: Value) -> float:
    """A rate of 0 is no limit."""
    return _number(value) or float("inf")
