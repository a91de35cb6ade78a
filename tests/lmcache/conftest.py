"""Tests on LMCache's own classes: `make test-lmcache` runs them in an environment of its own, else none."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("lmcache") else ["test_*.py"]
