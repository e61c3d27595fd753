"""What a request can fail with, for every layer of the front.

`RequestError` is the client's fault (or a per-request refusal) and becomes the endpoint family's
error body with `status_code`; `EngineUnavailableError` means that the server cannot work at all.
"""

from __future__ import annotations


class RequestError(ValueError):
    """A request that cannot be served; the text is meant for the client."""

    def __init__(
        self, message: str, *, status_code: int = 400, err_type: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status_code = status_code
        self.err_type = err_type


class RequestShapeError(RequestError):
    """The JSON of a `/generate` request has a wrong type or an unknown sampling key."""


class EngineUnavailableError(RequestError):
    """A scheduler died or does not answer."""

    def __init__(self, message: str, *, status_code: int = 503) -> None:
        super().__init__(message, status_code=status_code, err_type="EngineUnavailable")
