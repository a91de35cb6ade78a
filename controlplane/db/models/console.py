"""Sessions of the console: who is logged in with a browser."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.checks import sha256
from controlplane.db.models.base import Base


class ConsoleSession(Base):
    """One browser that is logged in. What is in the row opens nothing without the cookie, of which it has the hash.

    ``tenant_id``: NULL for a credential of the platform. ``subject``: resource name of its API key. ``sealed``: the
    credential, under a key that only the cookie yields (``controlplane.console.seal``). ``use_time``: when a page was
    last asked for, to within half a minute. ``expire_time``: the end of it, used or not.
    """

    __tablename__ = "console_sessions"
    __table_args__ = (sha256("cookie_sha256"),)

    cookie_sha256: Mapped[bytes] = mapped_column(primary_key=True)
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    subject: Mapped[str] = mapped_column(index=True)
    sealed: Mapped[bytes]
    create_time: Mapped[datetime]
    use_time: Mapped[datetime]
    expire_time: Mapped[datetime] = mapped_column(index=True)
