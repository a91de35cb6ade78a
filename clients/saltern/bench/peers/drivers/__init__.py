"""What runs inside a peer's virtual environment: ``python -m drivers NAME`` with the parent folder as PYTHONPATH.

Saltern is not installed there, so these modules use the standard library, each other (by relative import) and the
peer's own client, which is imported by name at run time.
"""
