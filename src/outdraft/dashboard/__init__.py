"""The web page: a playground that shows how every token came, and a live view of the engine."""

from outdraft.dashboard.feed import EngineFacts, LiveFeed
from outdraft.dashboard.router import dashboard_router

__all__ = ["EngineFacts", "LiveFeed", "dashboard_router"]
