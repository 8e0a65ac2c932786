"""The tensors of a checkpoint's files, by name, without reading them."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from outdraft.core.errors import ConfigError


class StoredTensors:
    """What some safetensors files hold. `places`: for each name a file, and the name in it."""

    def __init__(self, places: Mapping[str, tuple[Path, str]]) -> None:
        self._places = places

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def read(self, name: str) -> Tensor:
        """The whole tensor.

        Raises:
            ConfigError: there is none.
        """
        file, stored = self._place(name)
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_tensor(stored)

    def shape(self, name: str) -> list[int]:
        """Raises ConfigError if there is no such tensor."""
        file, stored = self._place(name)
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.get_slice(stored).get_shape())

    def dtype(self, name: str) -> str:
        """As safetensors names it, such as "F16"; raises ConfigError if there is no such tensor."""
        file, stored = self._place(name)
        with safe_open(file, framework="pt") as tensors:
            return str(tensors.get_slice(stored).get_dtype())

    def _place(self, name: str) -> tuple[Path, str]:
        if name not in self._places:
            raise ConfigError(f"the checkpoint lacks the tensor {name!r} of a quantised weight")
        return self._places[name]
