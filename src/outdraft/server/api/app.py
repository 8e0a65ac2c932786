"""The web application: all routes, one shape of errors."""

from collections.abc import Iterable
from importlib.metadata import version

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware

from outdraft.server.api.chat import chat_router
from outdraft.server.api.completions import completions_router
from outdraft.server.api.docs_page import docs_router
from outdraft.server.api.errors import install_error_handlers
from outdraft.server.api.middleware import HEADER, EarlyErrors, HostGuard, RequestIds
from outdraft.server.api.plain_routes import plain_routers
from outdraft.server.api.responses import responses_router
from outdraft.server.api.settings import ApiContext


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
    if settings.allowed_hosts is not None:
        app.add_middleware(HostGuard, allowed_hosts=settings.allowed_hosts)
    app.add_middleware(EarlyErrors)
    app.add_middleware(RequestIds, logs=settings.log_requests)  # the outermost one
    own = [make(context) for make in (chat_router, completions_router, responses_router)]
    for router in (*own, *plain_routers(context), *routers, docs_router(app)):
        app.include_router(router)
    return app
