"""/docs: the API's description as a page that loads nothing from elsewhere."""

from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Response

METHODS = ("get", "post", "put", "patch", "delete")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
STYLE = """
:root { color-scheme: light dark; font: 1rem/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code, b { font-family: ui-monospace, monospace }
h2, h3 { margin: 2rem 0 0 }
dt { margin-top: .4rem }
dd { margin-left: 1.5rem; opacity: .8 }
"""

Json = Mapping[str, Any]


def docs_router(app: FastAPI) -> APIRouter:
    """The page, made of the application's OpenAPI description when it is asked for first."""
    router = APIRouter(include_in_schema=False)

    @cache
    def page() -> bytes:
        return "".join(_page(app.openapi())).encode()

    @router.get("/docs")
    async def docs() -> Response:
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        return Response(page(), media_type="text/html; charset=utf-8", headers=headers)

    return router


def _page(api: Json) -> Iterator[str]:
    title = escape(f"{api['info']['title']} {api['info']['version']}")
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
    yield f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
    yield f"<h1>{title}</h1><p>For programs: <code>/openapi.json</code>.</p><h2>Paths</h2>"
    for path, operations in api["paths"].items():
        for method in METHODS:
            if method in operations:
                yield from _operation(path, method, operations[method])
    yield "<h2>Objects</h2>"
    for name, schema in sorted(api.get("components", {}).get("schemas", {}).items()):
        yield f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3>'
        yield _paragraph(schema.get("description"))
        yield from _fields(schema)


def _operation(path: str, method: str, operation: Json) -> Iterator[str]:
    yield f"<h3><code>{method.upper()} {escape(path)}</code></h3>"
    yield _paragraph(operation.get("description") or operation.get("summary"))
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<p>Takes {_type(content['schema'])} as {escape(kind)}.</p>"


def _fields(schema: Json) -> Iterator[str]:
    if "properties" not in schema:
        yield f"<p>{_type(schema)}</p>"
        return
    required = schema.get("required", ())
    yield "<dl>"
    for name, field in schema["properties"].items():
        note = ", required" if name in required else ""
        if field.get("default") is not None:
            note = f", default {escape(repr(field['default']))}"
        yield f"<dt><b>{escape(name)}</b>: {_type(field)}{note}"
        if "description" in field:
            yield f"<dd>{escape(field['description'])}"
    yield "</dl>"


def _type(schema: Json) -> str:
    """What a value may be, as HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}"><code>{name}</code></a>'
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            return " or ".join(dict.fromkeys(_type(one) for one in schema[union]))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in values)
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(str(schema.get("type", "anything")))


def _paragraph(text: str | None) -> str:
    return f"<p>{escape(text)}</p>" if text else ""
