"""The web application: all routes, one shape of errors."""

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.middleware.cors import CORSMiddleware
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from outdraft.server.api.chat import add_chat_route
from outdraft.server.api.completions import add_completions_route
from outdraft.server.api.errors import install_error_handlers
from outdraft.server.api.middleware import HEADER, Door
from outdraft.server.api.plain_routes import (
    add_model_routes,
    add_profile_routes,
    add_stored_response_routes,
    add_token_routes,
    health_router,
)
from outdraft.server.api.responses import add_responses_route
from outdraft.server.api.settings import ApiContext, guarded_router

DOCS_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
)


def create_app(context: ApiContext, routers: Iterable[APIRouter] = ()) -> FastAPI:
    """The application that serves one engine.

    `routers`: more routes. They are not guarded by the API key.
    """
    settings = context.settings
    app = FastAPI(
        title="outdraft",
        version=version("outdraft"),
        docs_url=None,  # these pages load their scripts from elsewhere; /docs is our own
        redoc_url=None,
        redirect_slashes=False,
    )
    app.root_path = settings.root_path  # paths are found with it and without it
    install_error_handlers(app, settings.retry_after_s)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[HEADER],
        )
    # The outermost one.
    app.add_middleware(Door, logs=settings.log_requests, allowed_hosts=settings.allowed_hosts)
    own = guarded_router(context)
    for add in (
        *(add_chat_route, add_completions_route, add_responses_route, add_model_routes),
        *(add_token_routes, add_stored_response_routes, add_profile_routes),
    ):
        add(own, context)
    for router in (own, health_router(context), *routers, _docs_router(app)):
        app.include_router(router)
    return app


def _docs_router(app: FastAPI) -> APIRouter:
    """The page, made of the application's OpenAPI description when it is asked for first."""
    router = APIRouter(include_in_schema=False)

    @cache
    def page() -> str:
        pages = Environment(loader=PackageLoader(__package__ or ""), autoescape=True)
        template = pages.get_template("docs.html")
        return template.render(api=app.openapi(), type=_type, represented=repr)

    @router.get("/docs")
    async def docs() -> Response:
        headers = {"Content-Security-Policy": DOCS_POLICY, "X-Content-Type-Options": "nosniff"}
        return Response(page(), media_type="text/html; charset=utf-8", headers=headers)

    return router


def _type(schema: Mapping[str, Any]) -> Markup:
    """The values that a schema allows, as HTML."""
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
