"""Errors of the server, in the form in which OpenAI's clients expect them."""

from __future__ import annotations

from typing import Any

from specgen.base.errors import RunError, SpecgenError, is_out_of_memory
from specgen.pair.prompts import ContextFull

INVALID = "invalid_request_error"


class ApiError(Exception):
    """An error that a client gets: an HTTP status with a message.

    `param` names the field of the request that is wrong, None if no field is. `code` is a short
    name that programs can compare. `retry_after` are the seconds after which the request may
    succeed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = INVALID,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def of_generation(error: Exception, prompt_field: str) -> ApiError:
    """Returns the answer to a request whose generation has failed with `error`. `prompt_field` is
    the request's field with the prompt."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextFull):
        return ApiError(400, error.message, param=prompt_field, code="context_length_exceeded")
    if isinstance(error, SpecgenError) and not isinstance(error, RunError):
        return ApiError(400, error.message, param=prompt_field)
    if isinstance(error, RunError):
        return ApiError(500, error.message, kind="server_error")
    if is_out_of_memory(error):
        return ApiError(500, "out of memory", kind="server_error", code="out_of_memory")
    return ApiError(500, f"internal error: {type(error).__name__}", kind="server_error")
