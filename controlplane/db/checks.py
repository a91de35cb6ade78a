"""CHECK constraints: what a row may hold, as SQL; each is named after its column and its rule."""

from __future__ import annotations

from sqlalchemy import CheckConstraint

SHA256_BYTES = 32


def identifier(column: str) -> CheckConstraint:
    """The rule of ``saltern.names.parse_identifier``."""
    return CheckConstraint(f"{column} ~ '^[a-z]([a-z0-9-]{{0,61}}[a-z0-9])?$'", name=f"{column}_identifier")


def one_of(column: str, *values: str) -> CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=f"{column}_known")


def in_range(column: str, low: int, high: int) -> CheckConstraint:
    return CheckConstraint(f"{column} BETWEEN {low} AND {high}", name=f"{column}_range")


def length(column: str, high: int) -> CheckConstraint:
    return CheckConstraint(f"char_length({column}) <= {high}", name=f"{column}_length")


def not_negative(column: str) -> CheckConstraint:
    return CheckConstraint(f"{column} >= 0", name=f"{column}_not_negative")


def is_object(column: str) -> CheckConstraint:
    return CheckConstraint(f"jsonb_typeof({column}) = 'object'", name=f"{column}_is_object")


def sha256(column: str) -> CheckConstraint:
    return CheckConstraint(f"octet_length({column}) = {SHA256_BYTES}", name=f"{column}_is_sha256")
