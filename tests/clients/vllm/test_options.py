"""What an engine's configuration may say, and what it is told when it says something else."""

from __future__ import annotations

import pytest

from saltern.errors import InvalidArgumentError
from saltern.vllm.options import ConnectorOptions, parse_options

GOOD = {"control": "127.0.0.1:7700", "namespace": "chat", "api_key_file": "/run/key"}


def test_an_unknown_option_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        parse_options({**GOOD, "load_async": True}, {})
    assert "'load_async'" in raised.value.message
    for name in ConnectorOptions.__struct_fields__:
        assert name in raised.value.hint


@pytest.mark.parametrize(
    "wrong",
    [
        {"load": "eager"},
        {"lookup_deadline_ms": 0},
        {"lookup_deadline_ms": "fast"},
        {"load_threads": 0},
        {"load_threads": 1.5},
        {"save": "yes"},
        {"save_staging_bytes": "much"},
        {"tenancy": "none"},
        {"strict_start": 1},
    ],
)
def test_a_value_that_makes_no_sense_is_an_error_that_names_its_option(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        parse_options({**GOOD, **wrong}, {})
    assert next(iter(wrong)) in raised.value.message


@pytest.mark.parametrize("missing", ["control", "namespace", "api_key_file"])
def test_what_is_missing_is_named_with_its_variable(missing: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        parse_options({name: value for name, value in GOOD.items() if name != missing}, {})
    assert missing in raised.value.message
    assert "SALTERN_" in raised.value.hint


def test_what_is_not_given_comes_from_the_environment_and_what_is_given_wins() -> None:
    environment = {
        "SALTERN_CONTROL": "10.0.0.1:7700",
        "SALTERN_NAMESPACE": "other",
        "SALTERN_API_KEY": "sk",
        "HOME": "/root",
    }
    options = parse_options({"namespace": "chat"}, environment)
    assert (options.control, options.namespace) == ("10.0.0.1:7700", "chat")


def test_sizes_are_written_as_people_write_them() -> None:
    options = parse_options({**GOOD, "load_staging_bytes": "64MiB", "save_staging_bytes": 8192}, {})
    assert (options.load_staging_bytes, options.save_staging_bytes) == (64 * 1024 * 1024, 8192)


def test_request_tenancy_needs_no_credentials_of_the_engine() -> None:
    given = {"control": "127.0.0.1:7700", "tenancy": "request"}
    assert parse_options(given, {"SALTERN_GATEWAY_SEAL_KEY_FILE": "key"}).seal_key_file == "key"
    assert parse_options(given | {"plain_tokens": True}, {}).tenancy == "request"
    with pytest.raises(InvalidArgumentError, match="seal_key_file"):
        parse_options(given, {})
