"""Errors as OpenAI writes them: {"error": {"message", "type", "param", "code"}}, with its codes.

No stack, no path and no value of any request is ever part of one, except what core.errors says of
the request's own parameters.
"""

import json
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from outdraft.core.errors import (
    CapacityError,
    ContextLengthError,
    EngineDeadError,
    GenerationError,
    OutdraftError,
    RequestError,
    closest_name,
)
from outdraft.server.api.fields import TOO_MANY_ERRORS, UNSUPPORTED

_SHOULD_BE = "Input should be "
_NO_OBJECT = ("model_type", "model_attributes_type", "dict_type")  # as pydantic calls it
_WRONG_TYPES = ("string_type", "list_type", "int_type", "bool_type", "literal_error", *_NO_OBJECT)
# What pydantic finds wrong, by OpenAI's names; it also has many names of types that end alike.
_CODES = {
    "missing": "missing_required_parameter",
    "union_tag_not_found": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "int_from_float": "invalid_type",
    UNSUPPORTED: "unsupported_value",
}


class ErrorBody(BaseModel):
    """The error, for programs and for people."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(BaseModel):
    """The body of every reply that is not a success."""

    error: ErrorBody


class ApiError(OutdraftError):
    """A reply that is not a success. `kind`: whether the request is its cause, or the server."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        *,
        param: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(message=message, type=kind, param=param, code=code)
        self.headers = headers


def unknown_model(name: str) -> ApiError:
    message = f"the model {name!r} does not exist: see /v1/models"
    return ApiError(404, message, "model_not_found", param="model")


def draining(retry_after_s: int) -> ApiError:
    message = "the server is shutting down and takes no more requests"
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, "draining", kind="service_unavailable_error", headers=headers)


def engine_dead(status: int = 500, ended_by: str | None = None) -> ApiError:
    """`ended_by`: the signal or exit code of the engine's process, where it is known."""
    message = "the engine has stopped" + (f": {ended_by}" if ended_by else "")
    return ApiError(status, message, "engine_dead", kind="server_error")


def as_api_error(error: Exception, retry_after_s: int) -> ApiError:
    """The reply to any exception; it says nothing about one of an unknown type."""
    match error:
        case ApiError():
            return error
        case RequestError():
            is_long = isinstance(error, ContextLengthError)
            code = "context_length_exceeded" if is_long else "invalid_value"
            return ApiError(400, str(error), code, param=error.field)
        case CapacityError():
            kind, headers = "rate_limit_error", {"Retry-After": str(retry_after_s)}
            return ApiError(429, str(error), "rate_limit_exceeded", kind=kind, headers=headers)
        case GenerationError():
            return ApiError(500, str(error), "generation_failed", kind="server_error")
        case EngineDeadError():
            return engine_dead(ended_by=error.ended_by)
        case _:
            # uvicorn closes the connection after such a reply: a client must not use it again.
            kind, headers = "server_error", {"connection": "close"}
            return ApiError(500, "internal error", "internal_error", kind=kind, headers=headers)


def error_json(error: ApiError) -> bytes:
    """ASCII, so that a name that is not valid Unicode can be quoted."""
    return json.dumps(ErrorReply(error=error.body).model_dump()).encode("ascii")


def error_response(error: ApiError) -> Response:
    return Response(
        error_json(error), error.status, headers=error.headers, media_type="application/json"
    )


def install_error_handlers(app: FastAPI, retry_after_s: int) -> None:
    """Give every reply of the application that is not a success its shape."""

    async def on_error(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            body = getattr(request.scope.get("route"), "body_field", None)
            kind = body.field_info.annotation if body is not None else None
            return error_response(_validation_error(error, kind))
        if isinstance(error, HTTPException):
            return error_response(_http_error(request, error))
        reply = error_response(as_api_error(error, retry_after_s))
        # Other errors are answered outside of the middleware that does this elsewhere.
        if (request_id := request.scope.get("state", {}).get("request_id")) is not None:
            reply.headers["x-request-id"] = request_id
        return reply

    for kind in (OutdraftError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)


def _http_error(request: Request, error: HTTPException) -> ApiError:
    method, path = request.method, request.url.path
    known = {
        404: (f"unknown path: {method} {path}", "unknown_url"),
        405: (f"{method} is not allowed on {path}", "method_not_supported"),
        413: (error.detail, "request_too_large"),
    }
    message, code = known.get(error.status_code, (error.detail, None))
    return ApiError(error.status_code, message, code, headers=error.headers)


def _validation_error(error: RequestValidationError, body_kind: object) -> ApiError:
    """The most specific of what pydantic found: of a union it lists the errors of every member.

    `body_kind`: the body's annotation, for the name that a misspelt one is closest to.
    """
    details: Sequence[Any] = error.errors()
    paths = [_path(detail, error.body) for detail in details]
    path, detail = max(zip(paths, details, strict=True), key=lambda pair: len(pair[0]))
    kind = detail["type"]
    if not path and kind == TOO_MANY_ERRORS:
        return ApiError(400, f"the body is not as documented: {detail['msg']}")
    if not path:
        return ApiError(400, "the body must be a JSON object, sent as application/json")
    if kind == "union_tag_not_found":  # what tells the members of the union apart
        path = [*path, detail["ctx"]["discriminator"].strip("'")]
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    name = "".join(parts).removeprefix(".")
    if kind == "extra_forbidden":
        close = closest_name(str(path[-1]), _names_at(body_kind, path[:-1]))
        hint = f": did you mean {close!r}?" if close is not None else ""
        wrong = f"this field is unknown or not supported{hint}"
    else:
        same = [one for one, other in zip(details, paths, strict=True) if other == path]
        wrong = _what_is_wrong(detail, same)
    code = _CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    return ApiError(400, f"{name}: {wrong}", code, param=name)


def _what_is_wrong(detail: Mapping[str, Any], same: Sequence[Mapping[str, Any]]) -> str:
    """The message of `detail`; `same` are the errors of the same value, of all members of a union.

    The message about a value that is of no member's type names all of these types.
    """
    if detail["type"] == "union_tag_not_found":
        return "Field required"
    if detail["type"] not in _WRONG_TYPES:
        return detail["msg"]
    wanted = [
        "an object" if one["type"] in _NO_OBJECT else one["msg"].removeprefix(_SHOULD_BE)
        for one in same
        if one["type"] in _WRONG_TYPES
    ]
    return _SHOULD_BE + " or ".join(dict.fromkeys(wanted))


def _names_at(kind: object, path: Sequence[str | int]) -> set[str]:
    """Names of the fields that an object may have at a path in a value; `kind`: its annotation."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _names_at(arguments[0], path)
    if origin in (Union, UnionType):
        return {name for member in arguments for name in _names_at(member, path)}
    if origin is list and path:
        return _names_at(arguments[0], path[1:])
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return set()
    fields = {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
    return _names_at(fields.get(str(path[0])), path[1:]) if path else set(fields)


def _path(detail: Mapping[str, Any], body: object) -> list[str | int]:
    """The place of an error, without the names that pydantic gives to the members of a union."""
    path: list[str | int] = []
    location = detail["loc"][1:]  # the first says "body", "path" or "query"
    value = body if detail["loc"][0] == "body" else dict.fromkeys(location)
    for position, part in enumerate(location):
        is_last = position == len(location) - 1
        if isinstance(value, dict) and (part in value or (is_last and detail["type"] == "missing")):
            path.append(part)
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            path.append(part)
            value = value[part]
    return path
