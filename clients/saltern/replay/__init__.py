"""``saltern replay``: what a cache would do for recorded traffic, what it costs, and when it pays.

::

    traces ----+
    setup  ----+--> an engine, column by column --> ColumnResult --+--> ReplayReport --> tables, JSON, CSV, HTML
    profiles --+     simulated | measured                           |
                                         references, cost ---------+

Everything in here is a pure value or rule; engines are found by :mod:`saltern.replay.engines`. ``results`` is the
model that every engine fills and every output reads; ``diff`` compares two of them.
"""
