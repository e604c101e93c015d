"""The kernels are compiled once for all processes of a test run."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock

_SHARED = "SPECGEN_TEST_KERNELS"


def choose_folder() -> list[str]:
    """Chooses the folder of compiled kernels for this process and those that it starts. Returns the
    folder that was made for that, if any."""
    if _SHARED in os.environ:
        return []
    os.environ[_SHARED] = tempfile.mkdtemp(prefix="specgen-kernels-")
    return [os.environ[_SHARED]]


def shared_folder() -> Path:
    return Path(os.environ[_SHARED])


def load_kernels() -> None:
    """Compiles the kernels unless another process of the run did, and loads them. A compiler that
    fails is an error."""
    from specgen.engine.kernels import library

    with FileLock(shared_folder() / "lock"):
        before = os.environ["SPECGEN_CACHE"]
        os.environ["SPECGEN_CACHE"] = str(shared_folder())
        try:
            library.kernels()
        finally:
            os.environ["SPECGEN_CACHE"] = before
    reason = library.why_none()
    expected = (
        "there are none for",
        "there is no C compiler",
        "SPECGEN_KERNELS is torch",
        "this processor has no AVX2",
    )
    assert reason is None or reason.startswith(expected), reason
    give_kernels(Path(before))


def give_kernels(cache: Path) -> None:
    """Copies the compiled kernels to a folder of caches, for commands that run with it."""
    if (shared_folder() / "kernels").is_dir():
        shutil.copytree(shared_folder() / "kernels", cache / "kernels", dirs_exist_ok=True)
