"""The measured engine of ``saltern replay``: real nodes, real bytes through the SDK; prefill and arrivals modelled.

::

    options   what is scaled, how many calls are in flight, how fast time runs
    cluster   a control plane and nodes, as processes that can be restarted and killed; node_books reads what they count
    cast      the trace's tenants: quotas, API keys, one client each
    calls     one prompt: lookup and read, store; with what memory
    driver    the loop: arrivals and prefill in virtual time, calls for real, several in flight
    engine    columns, one after the other
"""
