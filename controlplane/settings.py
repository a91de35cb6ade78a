"""Settings of the control plane: from the command line, else from the environment (``SALTERN_*``)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from controlplane.core.lease_terms import LEASE_DURATION_DEFAULT_S
from saltern.endpoints import Endpoint, check_plaintext, parse_endpoint
from saltern.errors import InvalidArgumentError
from saltern.tls import ServerTls, server_tls
from tenants.tokens import LIFETIME_MAX_S

CONTROL_PORT_DEFAULT = 7700
METRICS_PORT_DEFAULT = 7704
TOKEN_LIFETIME_DEFAULT_S = 600
TOKEN_LIFETIME_MIN_S = 5
LEASE_DURATION_MIN_S = 10
LEASE_DURATION_MAX_S = 24 * 3600
SIGNING_KEY_MAX_AGE_DEFAULT_S = 30 * 86400
SIGNING_KEY_MAX_AGE_MIN_S = 3600
SIGNING_KEY_MAX_AGE_MAX_S = 366 * 86400
CHECKPOINT_INTERVAL_DEFAULT_S = 60.0
CHECKPOINT_INTERVAL_MIN_S = 1.0
CHECKPOINT_INTERVAL_MAX_S = 600.0
#: Thirteen months: a whole year beside the month that is being billed.
USAGE_RETENTION_DEFAULT_DAYS = 397
USAGE_RETENTION_MIN_DAYS = 62
USAGE_RETENTION_MAX_DAYS = 3660


class ControlSettings(BaseSettings):
    """What ``saltern serve control`` runs with. Names in the environment stand beside each field.

    Attributes:
        listen: ``SALTERN_CONTROL_LISTEN``.
        metrics_listen: ``SALTERN_CONTROL_METRICS_LISTEN``: where metrics are served over HTTP; None, or the text
            ``off``, for nowhere.
        console_listen: ``SALTERN_CONSOLE_LISTEN``: where the console serves browsers; None, or the text ``off``, for
            nowhere. It shows the certificate of ``tls_cert``.
        console_prices: ``SALTERN_CONSOLE_PRICES``: a price file, by which the console says what usage costs.
        database_url: ``SALTERN_DATABASE_URL``: the application role, without BYPASSRLS.
        migration_database_url: ``SALTERN_MIGRATION_DATABASE_URL``: the role that owns the schema; unset where the
            schema is that of this release already.
        state_dir: ``SALTERN_STATE_DIR``: holds the key-encryption key and, until it is redeemed, the bootstrap token.
        kms_endpoint: ``SALTERN_KMS_ENDPOINT``: the socket of a key management service's plug-in (Kubernetes KMS v2), as
            ``unix:///run/kms.sock``; unset where key-encryption keys lie in a file or the environment.
        allow_plaintext: ``SALTERN_ALLOW_PLAINTEXT``: listen beyond this host without TLS.
        tls_cert, tls_key: ``SALTERN_CONTROL_TLS_CERT``, ``SALTERN_CONTROL_TLS_KEY``: files; neither for plain text.
        tls_client_ca: ``SALTERN_CONTROL_TLS_CLIENT_CA``: turn away whoever shows no certificate of this authority.
        allow_unbound_node_keys: ``SALTERN_ALLOW_UNBOUND_NODE_KEYS``: make and take API keys of the role node that are
            good for every node; for deployments that have such keys, until they are replaced.
        token_lifetime_s: ``SALTERN_TOKEN_LIFETIME_S``: a shorter one ends the use of a revoked key sooner, at the
            price of more exchanges; 5 s to the hour that verifiers accept.
        lease_duration_s: ``SALTERN_LEASE_DURATION_S``: how long a node may grow without an answer of the control plane,
            and how long its part of quotas stays idle when it is lost; 10 s to a day. The same on every control plane.
        signing_key_max_age_s: ``SALTERN_SIGNING_KEY_MAX_AGE_S``: a key that has signed tokens for so long is followed
            by a new one; an hour to a year.
        audit_checkpoint_dir: ``SALTERN_AUDIT_CHECKPOINT_DIR``: where signed checkpoints of the audit trail are kept; a
            folder of ``state_dir`` if unset. The further from the database, the better.
        audit_checkpoint_url: ``SALTERN_AUDIT_CHECKPOINT_URL``: a folder of an object store to keep them in, such
            as ``s3://bucket/audit``, instead of a folder of files.
        audit_checkpoint_interval_s: ``SALTERN_AUDIT_CHECKPOINT_INTERVAL_S``: how often chains that moved are signed;
            what is newer than that can be changed unseen.
        usage_retention_days: ``SALTERN_USAGE_RETENTION_DAYS``: how long usage records are kept; 62 days to ten years.
    """

    model_config = SettingsConfigDict(populate_by_name=True, extra="ignore", frozen=True, hide_input_in_errors=True)

    listen: Annotated[Endpoint, NoDecode] = Field(
        default=Endpoint("127.0.0.1", CONTROL_PORT_DEFAULT), validation_alias=AliasChoices("SALTERN_CONTROL_LISTEN")
    )
    metrics_listen: Annotated[Endpoint | None, NoDecode] = Field(
        default=Endpoint("127.0.0.1", METRICS_PORT_DEFAULT),
        validation_alias=AliasChoices("SALTERN_CONTROL_METRICS_LISTEN"),
    )
    console_listen: Annotated[Endpoint | None, NoDecode] = Field(
        default=None, validation_alias=AliasChoices("SALTERN_CONSOLE_LISTEN")
    )
    console_prices: Path | None = Field(default=None, validation_alias=AliasChoices("SALTERN_CONSOLE_PRICES"))
    database_url: SecretStr = Field(validation_alias=AliasChoices("SALTERN_DATABASE_URL"))
    migration_database_url: SecretStr | None = Field(
        default=None, validation_alias=AliasChoices("SALTERN_MIGRATION_DATABASE_URL")
    )
    state_dir: Path = Field(validation_alias=AliasChoices("SALTERN_STATE_DIR"))
    kms_endpoint: str | None = Field(default=None, validation_alias=AliasChoices("SALTERN_KMS_ENDPOINT"))
    allow_plaintext: bool = Field(default=False, validation_alias=AliasChoices("SALTERN_ALLOW_PLAINTEXT"))
    tls_cert: Path | None = Field(default=None, validation_alias=AliasChoices("SALTERN_CONTROL_TLS_CERT"))
    tls_key: Path | None = Field(default=None, validation_alias=AliasChoices("SALTERN_CONTROL_TLS_KEY"))
    tls_client_ca: Path | None = Field(default=None, validation_alias=AliasChoices("SALTERN_CONTROL_TLS_CLIENT_CA"))
    allow_unbound_node_keys: bool = Field(
        default=False, validation_alias=AliasChoices("SALTERN_ALLOW_UNBOUND_NODE_KEYS")
    )
    token_lifetime_s: int = Field(
        default=TOKEN_LIFETIME_DEFAULT_S,
        ge=TOKEN_LIFETIME_MIN_S,
        le=LIFETIME_MAX_S,
        validation_alias=AliasChoices("SALTERN_TOKEN_LIFETIME_S"),
    )
    lease_duration_s: int = Field(
        default=LEASE_DURATION_DEFAULT_S,
        ge=LEASE_DURATION_MIN_S,
        le=LEASE_DURATION_MAX_S,
        validation_alias=AliasChoices("SALTERN_LEASE_DURATION_S"),
    )
    signing_key_max_age_s: int = Field(
        default=SIGNING_KEY_MAX_AGE_DEFAULT_S,
        ge=SIGNING_KEY_MAX_AGE_MIN_S,
        le=SIGNING_KEY_MAX_AGE_MAX_S,
        validation_alias=AliasChoices("SALTERN_SIGNING_KEY_MAX_AGE_S"),
    )
    audit_checkpoint_dir: Path | None = Field(
        default=None, validation_alias=AliasChoices("SALTERN_AUDIT_CHECKPOINT_DIR")
    )
    audit_checkpoint_url: str | None = Field(
        default=None, validation_alias=AliasChoices("SALTERN_AUDIT_CHECKPOINT_URL")
    )
    audit_checkpoint_interval_s: float = Field(
        default=CHECKPOINT_INTERVAL_DEFAULT_S,
        ge=CHECKPOINT_INTERVAL_MIN_S,
        le=CHECKPOINT_INTERVAL_MAX_S,
        validation_alias=AliasChoices("SALTERN_AUDIT_CHECKPOINT_INTERVAL_S"),
    )
    usage_retention_days: int = Field(
        default=USAGE_RETENTION_DEFAULT_DAYS,
        ge=USAGE_RETENTION_MIN_DAYS,
        le=USAGE_RETENTION_MAX_DAYS,
        validation_alias=AliasChoices("SALTERN_USAGE_RETENTION_DAYS"),
    )

    @property
    def tls(self) -> ServerTls | None:
        """What the gRPC door shows; raises InvalidArgumentError where only part of it is given."""
        return server_tls(self.tls_cert, self.tls_key, self.tls_client_ca)

    @field_validator("listen", mode="before")
    @classmethod
    def _parse_listen(cls, value: object) -> object:
        return parse_endpoint(value) if isinstance(value, str) else value

    @field_validator("metrics_listen", "console_listen", mode="before")
    @classmethod
    def _parse_listen_or_off(cls, value: object) -> object:
        if value == "off":
            return None
        return parse_endpoint(value) if isinstance(value, str) else value


_MISSING_HINTS = {
    "database_url": "give --database-url or set SALTERN_DATABASE_URL (postgresql://USER:PASSWORD@HOST/DATABASE), "
    "or run `saltern up`, which brings its own Postgres",
    "state_dir": "give --state-dir or set SALTERN_STATE_DIR",
}


def load_settings(**given: object) -> ControlSettings:
    """Settings from what was given on the command line (None: not given) and the environment.

    Raises:
        InvalidArgumentError: one is missing or malformed; one line, never with the value of a secret.
        FailedPreconditionError: reason PLAINTEXT_REFUSED, see :func:`saltern.endpoints.check_plaintext`.
    """
    try:
        settings = ControlSettings(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0])
        field = name.removeprefix("SALTERN_").removeprefix("CONTROL_").lower()
        if first["type"] == "missing":
            raise InvalidArgumentError(
                f"the setting {field} is missing", reason="SETTING_MISSING", hint=_MISSING_HINTS.get(field, "")
            ) from None
        raise InvalidArgumentError(
            f"the setting {field} is malformed: {first['msg']}",
            reason="SETTING_MALFORMED",
            hint="see `saltern serve control --help`",
        ) from None
    if settings.tls is None:
        check_plaintext(settings.listen, allow_plaintext=settings.allow_plaintext, what="--listen")
        if settings.console_listen is not None:
            check_plaintext(settings.console_listen, allow_plaintext=settings.allow_plaintext, what="--console-listen")
    if settings.metrics_listen is not None:
        check_plaintext(settings.metrics_listen, allow_plaintext=settings.allow_plaintext, what="--metrics-listen")
    return settings
