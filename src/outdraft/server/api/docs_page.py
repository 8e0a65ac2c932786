"""/docs: the API's description as a page that loads nothing from elsewhere."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"


def docs_router(app: FastAPI) -> APIRouter:
    """The page, made of the application's OpenAPI description when it is asked for first."""
    router = APIRouter(include_in_schema=False)

    @cache
    def page() -> str:
        pages = Environment(loader=PackageLoader(__package__ or ""), autoescape=True)
        template = pages.get_template("docs.html")
        return template.render(api=app.openapi(), type=_type, represented=repr)

    @router.get("/docs")
    async def docs() -> Response:
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        return Response(page(), media_type="text/html; charset=utf-8", headers=headers)

    return router


def _type(schema: Mapping[str, Any]) -> Markup:
    """What a value may be."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return Markup('<a href="#{}"><code>{}</code></a>').format(name, name)
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            return Markup(" or ").join(dict.fromkeys(map(_type, schema[union])))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return Markup(" or ").join(Markup("<code>{}</code>").format(repr(one)) for one in values)
    if schema.get("type") == "array":
        return Markup("list of ") + _type(schema.get("items", {}))
    return Markup.escape(schema.get("type", "anything"))
