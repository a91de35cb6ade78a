"""The console: web pages of the control plane for administrators and auditors (docs/console.md).

::

    browser ──cookie──> uvicorn (serving) ─> guard: headers, sizes, origin ─> pages: one route each
                                                                                │ session: cookie ─> credential
                                                                                └ calls ─unix socket─> the door, the
                                                                                  services, the audit trail

Pages decide nothing. Whatever they show or do is a call of the same services that the command line calls, with a token
of the person's own credential, so that permissions, row-level security and the audit trail are the very same (I1, I2,
I11). Of the database the console uses one table: its sessions.

``views`` is the functional core: from messages of the services to what a template shows, without I/O.
"""
