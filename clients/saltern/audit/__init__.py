"""The audit trail outside the control plane: what an event's hash is, checkpoints, exports, and proof by verification.

``chain`` and ``checkpoints`` are shared with the control plane, which writes what they define; everything here works
offline and holds no secret.
"""
