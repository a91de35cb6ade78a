"""Salts of tenants: root secrets, epochs and their rotation. The rules are in ``controlplane.core.salt_rotation``."""
