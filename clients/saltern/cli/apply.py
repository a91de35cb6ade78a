"""``saltern apply``: make a deployment what files say; ``saltern export-config``: write it down as such a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from saltern.cli.confirmation import confirm, yes_option
from saltern.cli.failure import say
from saltern.cli.parameters import TENANT
from saltern.cli.render import make_console, print_json
from saltern.cli.secret_file import secret_file
from saltern.cli.settings import Command, settings_of
from saltern.cli.stack import connect, find_target
from saltern.cli.waiting import wait_option
from saltern.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    SalternError,
    UnavailableError,
)
from saltern.names import TenantId

if TYPE_CHECKING:
    from saltern.apply.executor import Executor
    from saltern.apply.planner import Plan, Step
    from saltern.apply.resources import Declaration

_FOLDER: Final = click.Path(file_okay=False, exists=True, path_type=Path)
_PROGRESS_FROM: Final = 25


@click.command("apply", cls=Command)
@click.option(
    "--file", "-f", "files", multiple=True, required=True, metavar="PATH",
    help="A YAML or JSON file, a folder of such files, or - for standard input; may be repeated.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show the plan and change nothing.")
@click.option("--prune", is_flag=True, help="Delete what is in no file, in the lists that the files write out.")
@click.option("--prune-tenants", is_flag=True, help="Delete tenants that no file names (platform-admin).")
@click.option("--allow-below-use", is_flag=True, help="Accept limits below what is held now; nodes evict down to them.")
@click.option(
    "--save-secrets", type=_FOLDER, metavar="DIR", help="Write each new key's secret to DIR/TENANT.KEY.key (mode 0600)."
)
@click.option("--show-secrets", is_flag=True, help="Print each new key's secret, this once.")
@yes_option
@wait_option
@click.pass_context
def apply(
    ctx: click.Context,
    *,
    files: tuple[str, ...],
    dry_run: bool,
    prune: bool,
    prune_tenants: bool,
    allow_below_use: bool,
    save_secrets: Path | None,
    show_secrets: bool,
    yes: bool,
) -> None:
    """Make tenants, quotas, namespaces, keys and sharing groups what files say.

    Shows a plan, asks, and carries it out step by step. What a file does not mention stays as it is, nothing is deleted
    without --prune, and the same files a second time change nothing. After a failure run it again: it goes on where it
    stopped. The files are described in docs/apply.md.

    \b
    saltern apply -f tenants.yaml --dry-run
    saltern apply -f tenants.yaml --save-secrets secrets/ --wait
    saltern export-config | saltern apply -f - --dry-run
    """
    from saltern.apply.executor import Executor
    from saltern.apply.observer import observe
    from saltern.apply.planner import Mandate, plan
    from saltern.cli.apply_files import load_declaration
    from saltern.cli.apply_output import plan_json, plan_lines

    if save_secrets is not None and show_secrets:
        raise click.UsageError("--save-secrets and --show-secrets exclude each other")
    settings = settings_of(ctx)
    declared = _load(load_declaration, files)
    admin = connect(ctx)
    caller = TenantId(admin.tenant_id) or None
    _require_own_tenants(declared, caller)
    with _progress(ctx, len(declared.tenants)) as advance:
        actual = observe(admin, declared, all_tenants=prune_tenants, on_tenant=advance)
    mandate = Mandate(caller, find_target(settings).api_key.lookup, prune=prune, prune_tenants=prune_tenants)
    planned = plan(declared, actual, mandate)
    if not settings.json:
        for line in plan_lines(planned, settings):
            say(line)
    if planned.conflicts:
        if settings.json:
            print_json({"plan": plan_json(planned)})
        raise _conflict_error(planned)
    if dry_run or not planned.steps:
        if settings.json:
            print_json({"plan": plan_json(planned)})
        return
    _require_place_for_secrets(planned, save_secrets, show_secrets)
    confirm(yes, _question(planned))
    _carry_out(ctx, planned, Executor(admin, allow_below_use=allow_below_use), save_secrets)


@click.command("export-config", cls=Command)
@click.argument("tenant_ids", metavar="[TENANT]...", type=TENANT, nargs=-1)
@click.pass_context
def export_config(ctx: click.Context, tenant_ids: tuple[TenantId, ...]) -> None:
    """Write tenants as a file that `saltern apply` takes: those named, else all (platform-admin) or the key's own.

    No secret is in it. Applied to the same deployment it changes nothing.

    \b
    saltern export-config > tenants.yaml
    saltern export-config acme blue --output json
    """
    from saltern.apply.export import to_documents, to_list, to_yaml
    from saltern.apply.observer import EVERYTHING, list_tenants, observe_tenant
    from saltern.apply.resources import World
    from saltern.names import parse_tenant_name

    admin = connect(ctx)
    if own := admin.tenant_id:
        tenants: Sequence[TenantId] = tenant_ids or (TenantId(own),)
    else:
        tenants = tenant_ids or [parse_tenant_name(item.name) for item in list_tenants(admin)]
    resources = []
    with _progress(ctx, len(tenants)) as advance:
        for tenant in tenants:
            found = list(observe_tenant(admin, tenant, EVERYTHING))
            if not found:
                raise NotFoundError(f"tenant {tenant!r} does not exist", hint="`saltern tenant list` shows all")
            resources += found
            advance(tenant)
    documents = to_documents(World.of(resources))
    if settings_of(ctx).json:
        print_json(to_list(documents))
    else:
        say(to_yaml(documents), nl=False)


def _load(load: Callable[[Sequence[str]], Declaration], files: Sequence[str]) -> Declaration:
    """As ``load``; every problem of a file goes to stderr in a line of its own, before the error."""
    from saltern.apply.schema import DeclarationError

    try:
        return load(files)
    except DeclarationError as error:
        if len(error.problems) > 1 and not settings_of(click.get_current_context()).json:
            for problem in error.problems:
                say(str(problem), err=True)
        raise


def _require_own_tenants(declared: Declaration, caller: TenantId | None) -> None:
    for tenant, origin in declared.tenants.items():
        if caller is not None and tenant != caller:
            raise PermissionDeniedError(
                f"{origin}: tenant {tenant!r} is not that of the key in use",
                reason="FOREIGN_TENANT",
                hint=f"apply with a key of {tenant!r}, or with a platform administrator's",
            )


def _conflict_error(planned: Plan) -> SalternError:
    first = planned.conflicts[0]
    for conflict in planned.conflicts[1:]:
        say(f"{conflict.resource.origin}: {conflict.message}; {conflict.hint}", err=True)
    more = f" (and {len(planned.conflicts) - 1} more)" if len(planned.conflicts) > 1 else ""
    return FailedPreconditionError(
        f"{first.resource.origin}: {first.message}{more}; nothing was changed",
        reason="CANNOT_BE_AS_DECLARED",
        hint=first.hint,
    )


def _require_place_for_secrets(planned: Plan, folder: Path | None, show: bool) -> None:
    """Before anything is changed: a secret that is made has somewhere to go."""
    from saltern.cli.apply_output import secret_file_name

    if planned.new_keys and folder is None and not show:
        raise InvalidArgumentError(
            f"{len(planned.new_keys)} API keys are to be made, and nobody is to get their secrets; nothing was changed",
            reason="NO_PLACE_FOR_SECRETS",
            hint="pass --save-secrets DIR to write them to files (mode 0600), or --show-secrets to print them once",
        )
    for key in planned.new_keys if folder else ():
        path = (folder or Path()) / secret_file_name(key)
        if path.is_symlink() or path.exists():
            raise AlreadyExistsError(
                f"the file {str(path)!r} exists and is not overwritten; nothing was changed",
                hint="name another folder, or remove the file",
            )


def _question(planned: Plan) -> str:
    from saltern.cli.apply_output import summary

    warned = sum(bool(step.warning) for step in planned.steps)
    return f"Do this ({summary(planned)}{f'; {warned} marked with !' if warned else ''})?"


def _carry_out(ctx: click.Context, planned: Plan, executor: Executor, folder: Path | None) -> None:
    """Do step after step; at the first failure say what is done and what is not, and stop."""
    from saltern.cli.apply_output import done_text, outcome_json

    settings = settings_of(ctx)
    done: list[Step] = []
    secrets: dict[str, str] = {}
    new_keys = {key.identity for key in planned.new_keys}
    try:
        for step in planned.steps:
            path = _secret_path(folder, step) if step.resource.identity in new_keys else None
            with secret_file(path) as write:
                secret = executor.apply(step)
                if path is not None:
                    write(secret)
            done.append(step)
            if secret and path is None:
                secrets[step.resource.name] = secret
            if not settings.json:
                say(done_text(step) + (f"; its secret is in {path}" if path else ""), err=True)
                if secret and path is None:
                    say(f"{step.resource.name} {secret}")
    except (SalternError, KeyboardInterrupt) as error:
        failed = planned.steps[len(done)]
        if settings.json:
            print_json(outcome_json(planned, done, failed, secrets))
        else:
            unsure = isinstance(error, UnavailableError | DeadlineExceededError | KeyboardInterrupt)
            state = "may be done or not" if unsure else "was refused"
            say(
                f"{len(done)} of {len(planned.steps)} steps are done; {failed.resource.kind} {failed.resource.name}"
                f" ({failed.action}) {state}; run the same command again to go on from there",
                err=True,
            )
        raise
    if settings.json:
        print_json(outcome_json(planned, done, None, secrets))


def _secret_path(folder: Path | None, step: Step) -> Path | None:
    from saltern.cli.apply_output import secret_file_name

    return None if folder is None else folder / secret_file_name(step.resource)


@contextmanager
def _progress(ctx: click.Context, total: int) -> Iterator[Callable[[TenantId], None]]:
    """A bar on a terminal while many tenants are read; nothing elsewhere."""
    settings = settings_of(ctx)
    if total < _PROGRESS_FROM or settings.json or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import Progress

    with Progress(console=make_console(settings, stderr=True), transient=True) as progress:
        task = progress.add_task("reading tenants", total=total)
        yield lambda _: progress.advance(task)
