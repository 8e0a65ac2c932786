"""The tensors of a checkpoint's files, by name, without reading them."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from outdraft.core.errors import ConfigError

Place = tuple[Path, str]  # a safetensors file, and the name of a tensor in it


class StoredTensors:
    """What some safetensors files hold, by the names of `places`.

    Threads may read at the same time.
    """

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = places
        self._headers: dict[Path, dict[str, tuple[list[int], str]]] = {}

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

    def read_at(self, name: str, index: int) -> Tensor:
        """The one at that index in a stack of tensors; raises as `read`."""
        file, stored = self._place(name)
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_slice(stored)[index]

    def read_part(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Some outputs and inputs of a weight: no more is read; raises as `read`."""
        file, stored = self._place(name)
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_slice(stored)[rows, columns]

    def shape(self, name: str) -> list[int]:
        """Raises ConfigError if there is no such tensor."""
        return self._header(name)[0]

    def dtype(self, name: str) -> str:
        """As safetensors names it, such as "F16"; raises ConfigError if there is no such tensor."""
        return self._header(name)[1]

    def _header(self, name: str) -> tuple[list[int], str]:
        file, stored = self._place(name)
        if file not in self._headers:
            self._headers[file] = _header_of(file)
        return self._headers[file][stored]

    def _place(self, name: str) -> Place:
        if name not in self._places:
            raise ConfigError(f"the checkpoint lacks the tensor {name!r} of a quantised weight")
        return self._places[name]


def _header_of(file: Path) -> dict[str, tuple[list[int], str]]:
    """Shapes and dtypes."""
    with safe_open(file, framework="pt") as tensors:
        slices = {str(name): tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        return {name: (list(one.get_shape()), str(one.get_dtype())) for name, one in slices.items()}
