"""What the embedded target brings for each method of speculation."""

from typing import Any, cast

from outdraft import assets


def with_embedded_network(values: dict[str, Any]) -> dict[str, Any]:
    """A speculative_config for the embedded target, its network named where it names none.

    The sources of a combination are completed one by one.

    Raises:
        ConfigError: this installation came without the network.
    """
    if isinstance(sources := values.get("sources"), list):
        listed = [_completed(source) for source in cast(list[object], sources)]
        return {**values, "sources": listed}
    method = values.get("method")
    if values.get("model") is not None:
        return values
    if method in ("draft_model", "combined"):
        return {**values, "model": str(assets.drafter_path())}
    if method in assets.HEADS:
        return {**values, "model": str(assets.head_path(method))}
    return values


def _completed(source: object) -> object:
    if not isinstance(source, dict):
        return source
    return with_embedded_network(cast(dict[str, Any], source))
