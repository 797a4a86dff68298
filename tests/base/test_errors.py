"""Errors a person can act on end the command with their own code."""

from __future__ import annotations

from rackserve.base import errors


def test_every_error_is_expected_and_codes_differ() -> None:
    kinds = [
        errors.RackserveError, errors.ConfigError, errors.FileFormatError, errors.ResourceError, errors.InvariantError,
    ]  # fmt: skip
    assert all(issubclass(kind, errors.RackserveError) for kind in kinds)
    codes = [kind.exit_code for kind in kinds]
    assert len(set(codes)) == len(codes)
    assert 0 not in codes


def test_a_request_error_names_the_field_and_the_status() -> None:
    error = errors.RequestError("max_tokens must be positive", param="max_tokens")
    assert (str(error), error.param, error.code, error.status) == (
        "max_tokens must be positive", "max_tokens", "invalid_value", 400,
    )  # fmt: skip
