"""``saltern demo``: two tenants on one node, end to end, with the proofs run before your eyes.

``plan`` splits a trace and sizes quotas, ``payload`` makes bytes, ``stack`` runs a private ``saltern up``, ``member``
makes a tenant, ``replay`` sends the traffic, ``proofs`` plays the attacker, ``report`` says what was seen, and
``scenario`` puts them in order.
"""
