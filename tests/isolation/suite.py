"""All cases, in the order of the rules."""

from __future__ import annotations

from tests.isolation import cases_budget, cases_bytes, cases_identity
from tests.isolation.table import CASES, by_rule

#: Importing a module adds its cases.
MODULES = (cases_identity, cases_budget, cases_bytes)
SUITE = by_rule(CASES)
