"""The files of a checkpoint, and the tensors in them, by name and without reading them.

Only safetensors are read, since a pickle runs any code that it holds.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from outdraft.core.errors import ConfigError
from outdraft.models.checkpoints.config_json import read_json
from outdraft.models.checkpoints.gguf_file import is_gguf
from outdraft.models.checkpoints.stored import StoredWeight

Place = tuple[Path, str]  # a safetensors file, and the name of a tensor in it

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
_UNWANTED = ["*/*", "consolidated*"]  # the same weights again, under other names
_MAX_NAMED = 5  # tensors that an error names


def resolve_model_path(
    name_or_path: str | os.PathLike[str], revision: str | None = None, *, with_weights: bool = True
) -> Path:
    """The directory of a checkpoint: a local one, else one of the hub, downloaded if need be. A
    GGUF file is a checkpoint of its own.

    Args:
        revision: branch, tag or commit on the hub; None: the main branch.
        with_weights: whether the weights are downloaded, too.

    Raises:
        ConfigError: there is neither, or the hub cannot be reached and has not been cached, or a
            revision is asked of a local directory.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ConfigError(
                f"revision {revision!r} is for models of the hub, and {str(path)!r} is a directory"
            )
        return path
    if path.is_file() and is_gguf(path):
        return path
    if path.exists():
        raise ConfigError(
            f"model {str(path)!r} is a file: give the directory of the checkpoint, or a GGUF file, "
            "which begins with GGUF"
        )
    name = str(name_or_path)
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ConfigError(f"model {name!r}: there is no such directory")
    from huggingface_hub import snapshot_download  # a directory needs none of it

    try:
        found = snapshot_download(
            name,
            revision=revision,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED if with_weights else [*_UNWANTED, "*.safetensors"],
        )
    except (OSError, ValueError) as error:  # the hub's own errors are one or the other
        raise ConfigError(
            f"model {name!r} is neither a directory nor a checkpoint that the hub can give: {error}"
        ) from error
    return Path(found)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory, in the order of their names.

    Raises:
        ConfigError: there are none, or the index names one that is not there.
    """
    if (path / _INDEX).is_file():
        weight_map = read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{path / _INDEX} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name:
                raise ConfigError(f"{path / _INDEX} names {name!r}, outside of its directory")
            if not (path / name).is_file():
                raise ConfigError(f"{path / _INDEX} names {name!r}, which is missing")
        return [path / name for name in names]
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    if any(path.glob("*.bin")) or any(path.glob("*.pt")):
        raise ConfigError(
            f"{path} has pickled weights only, which can run code when they are read: "
            f"convert them to {_SINGLE}"
        )
    raise ConfigError(f"{path} has neither {_SINGLE} nor {_INDEX}")


def tensor_places(
    files: Iterable[Path], slot_of: Callable[[str], str | None] = lambda name: name
) -> dict[str, Place]:
    """The place of the tensor of each slot; the frequencies of old checkpoints are left out.

    Args:
        slot_of: the slot of a tensor of that name; None: it is not wanted.

    Raises:
        ConfigError: a file cannot be read, or there are two tensors for one slot.
    """
    places: dict[str, Place] = {}
    twice: list[str] = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                names = [str(name) for name in tensors.keys()]  # noqa: SIM118  # not a mapping
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is damaged or cut short: {error}") from error
        for name in names:
            slot = None if name.endswith("rotary_emb.inv_freq") else slot_of(name)
            if slot in places:
                twice.append(slot)
            elif slot is not None:
                places[slot] = file, name
    if twice:
        raise ConfigError(f"the checkpoint has tensors twice: {listed(sorted(twice))}")
    return places


class StoredTensors:
    """The tensors of some safetensors files, by the names of `places`.

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

    def read_part(self, name: str, *indices: int | slice) -> Tensor:
        """The part at these indices, of which no more is read; raises as `read`."""
        file, stored = self._place(name)
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_slice(stored)[indices]

    def shape(self, name: str) -> list[int]:
        """The sizes of a tensor; raises ConfigError if there is none of this name."""
        return self._header(name)[0]

    def dtype(self, name: str) -> str:
        """The dtype by its name in safetensors, such as "F16"; raises ConfigError if there is
        none."""
        return self._header(name)[1]

    def _header(self, name: str) -> tuple[list[int], str]:
        file, stored = self._place(name)
        if file not in self._headers:
            with safe_open(file, framework="pt") as tensors:
                names = [str(one) for one in tensors.keys()]  # noqa: SIM118  # not a mapping
                slices = {one: tensors.get_slice(one) for one in names}
            self._headers[file] = {
                one: (list(part.get_shape()), str(part.get_dtype())) for one, part in slices.items()
            }
        return self._headers[file][stored]

    def _place(self, name: str) -> Place:
        if name not in self._places:
            raise ConfigError(f"the checkpoint lacks the tensor {name!r} of a quantised weight")
        return self._places[name]


def plain_weights(places: Mapping[str, Place]) -> dict[str, StoredWeight]:
    """The tensors of some safetensors files as weights that are not quantised."""
    tensors, found = StoredTensors(places), dict[str, StoredWeight]()
    for name, (_, stored) in places.items():
        shape = tuple(tensors.shape(name))
        found[name] = StoredWeight(
            shape=shape,
            label=tensors.dtype(name),
            group_inputs=shape[-1] if shape else 1,
            name=stored,
            is_plain=True,
            read=partial(tensors.read, name),
            read_part=partial(tensors.read_part, name),
        )
    return found


def read_tensor(place: Place) -> Tensor:
    """One tensor of a safetensors file."""
    file, name = place
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name)


def listed(names: Sequence[str]) -> str:
    """The first ones, and how many more there are."""
    rest = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")
