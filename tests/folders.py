"""Folders for files that several tests share."""

import atexit
import shutil
from pathlib import Path
from tempfile import mkdtemp


def new_folder() -> Path:
    """An empty folder, which goes when the tests of this process end."""
    folder = Path(mkdtemp(prefix="outdraft-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
