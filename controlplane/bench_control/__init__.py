"""Measures the control plane beside the bare limits of the machine: ``python -m controlplane.bench_control``.

Everything runs in processes of its own on this machine: a private Postgres, the control plane, an echo server, and one
client that keeps a number of calls in flight. The limits are measured in the same run, in turns with what they bound.
"""
