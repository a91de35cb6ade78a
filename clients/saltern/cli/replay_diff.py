"""What ``saltern replay diff`` prints."""

from __future__ import annotations

from itertools import groupby

import click
import msgspec

from saltern.cli.failure import one_line
from saltern.cli.render import Table
from saltern.cli.settings import Settings
from saltern.replay.diff import Comparison
from saltern.replay.rows import cell, change_cell, percent_cell


def print_json_comparison(comparison: Comparison) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(comparison), indent=2).decode())


def print_differences(settings: Settings, comparison: Comparison) -> None:
    """What the reports were made with differently, and what is not compared."""
    click.echo(f"A {one_line(comparison.first_name)}, {comparison.first_engine}")
    click.echo(f"B {one_line(comparison.second_name)}, {comparison.second_engine}\n")
    if comparison.differences:
        table = Table("MADE WITH", "A", "B")
        for one in comparison.differences:
            table.add(one.name + (" (another experiment)" if one.is_experiment else ""), one.first, one.second)
        table.print(settings)
    else:
        click.echo("Made alike: nothing differs in setup, traffic or program.")
    for reason in comparison.left_out:
        click.echo(f"not compared: {one_line(reason)}")
    click.echo()


def print_changes(settings: Settings, comparison: Comparison) -> None:
    """Every figure that changed, column by column."""
    label = comparison.engine.upper() + ("" if comparison.same_experiment else ", DIFFERENT EXPERIMENTS")
    equal = 0
    for (column, tenant), changes in groupby(comparison.changes, key=lambda one: (one.column, one.tenant)):
        where = str(column) if tenant is None else f"{column}, tenant {tenant or '-'}"
        table = Table(f"{label}: {where}", "A", "B", "CHANGE", "RELATIVE", right=("A", "B", "CHANGE", "RELATIVE"))
        told = 0
        for one in changes:
            if one.is_equal:
                equal += 1
                continue
            told += 1
            figures = (cell(one.first, one.unit), cell(one.second, one.unit))
            table.add(one.label, *figures, change_cell(one.absolute, one.unit), percent_cell(one.relative))
        if told:
            table.print(settings)
            click.echo()
    click.echo(f"{equal:,} of {len(comparison.changes):,} figures are equal in both and not shown.")
