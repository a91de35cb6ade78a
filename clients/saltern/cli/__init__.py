"""The ``saltern`` command. Scripts can rely on its exit codes (:mod:`saltern.cli.failure`) and its JSON
(:mod:`saltern.cli.render`); tables are for people and may change."""

from saltern.cli.app import cli, main

__all__ = ["cli", "main"]
