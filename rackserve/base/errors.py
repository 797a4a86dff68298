"""Errors a person can act on: each names the field or file at fault and the remedy."""

from __future__ import annotations


class RackserveError(Exception):
    """An expected failure: the command line prints its text without a traceback and exits with `exit_code`."""

    exit_code = 1


class ConfigError(RackserveError):
    """A configuration value is unknown, missing or out of range."""

    exit_code = 2


class FileFormatError(RackserveError):
    """A file (model, trace, recording) is missing, truncated or malformed; the text begins with `path:line` or `path`."""

    exit_code = 3


class ResourceError(RackserveError):
    """The machine lacks something the run needs: memory, a free port, a device."""

    exit_code = 4


class RequestError(RackserveError):
    """A client's request cannot be served as asked.

    `param` names the request field, `code` is the machine-readable reason, `status` the HTTP status it maps to.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class InvariantError(RackserveError):
    """A law of docs/invariants.md does not hold: a bug in rackserve, never the user's fault."""

    exit_code = 70
