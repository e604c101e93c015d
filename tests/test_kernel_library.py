"""The file of compiled kernels: in which folders it is kept and trusted, and who compiles it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from kernel_folder import shared_folder
from tuning_helpers import outcome
from worker_helpers import PROMPT, posix, save_pair

import specgen
from specgen.base.types import SamplingParams
from specgen.engine.kernels import library
from specgen.pair import profile as profiles
from specgen.pair import profile_place, profile_search
from specgen.pair.pair import Pair
from specgen.tune.profile import from_outcome

NOBODY = 65534  # a user's number
IS_ROOT = os.name == "posix" and os.getuid() == 0
Spoil = Callable[[Path, pytest.MonkeyPatch], None]

pytestmark = pytest.mark.skipif(library.kernels() is None, reason="there are no kernels here")


def library_file() -> Path:
    """The file that this run of the tests has compiled."""
    return next((shared_folder() / "kernels").glob(f"{library.kind()}-*.so"))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The compiled library, in a folder of caches of its own. To compile it is a failure."""
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path))
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    shutil.copy(library_file(), folder)

    def compiled(*_: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(library, "_compile", compiled)
    return folder / library_file().name


def is_anothers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_ROOT:
        os.chown(path, NOBODY, NOBODY)
        return
    lstat = Path.lstat

    def owned(other: Path) -> os.stat_result:
        status = lstat(other)
        fields = [*status]
        if other == path:
            fields[4] = NOBODY
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "lstat", owned)


def is_linked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = path.with_name(f"{path.name}-elsewhere")
    path.rename(target)
    path.symlink_to(target)


SPOILT: list[tuple[str, Spoil]] = [
    ("belongs to another user", is_anothers),
    ("other users may write to", lambda path, _: path.chmod(0o770)),
    ("other users may write to", lambda path, _: path.chmod(0o702)),
    ("is a symbolic link", is_linked),
]


def loaded() -> tuple[library.Library | None, str | None]:
    """What a new process would load, or why nothing."""
    return library._loaded.__wrapped__()


@pytest.mark.parametrize(("reason", "spoil"), SPOILT)
@pytest.mark.parametrize("place", ["the folder of caches", "the folder of kernels", "the file"])
def test_what_others_could_change_is_not_loaded(
    kept: Path, place: str, reason: str, spoil: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their code would run as the user. The target then runs on torch, which `inspect` says."""
    before, why = loaded()
    assert before is not None, why
    paths = {
        "the folder of caches": kept.parent.parent,
        "the folder of kernels": kept.parent,
        "the file": kept,
    }
    spoil(paths[place], monkeypatch)
    found, why = loaded()
    assert found is None
    assert reason in (why or "")
    assert str(paths[place]) in (why or "")


# What a process says that has mounted a file system in memory on its folder of caches, which nobody
# else sees: whether it may, then why it has no kernels, and what it says of compiling.
MOUNTED = """
import pathlib, subprocess, sys
from specgen.engine.kernels import library
folder = pathlib.Path(sys.argv[1])
options, after = sys.argv[2:]
subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
if after == "folder":
    (folder / "kernels").mkdir(mode=0o700)
if after:
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
said = []
library.prepare(said.append)
print(library.why_none(), said, [*folder.glob("kernels/*")], sep="|")
"""


def in_a_mount(folder: Path, options: str, after: str = "") -> str | None:
    """What `MOUNTED` prints; None if this user may not mount."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return None
    command = [unshare, "--mount", sys.executable, "-c", MOUNTED, str(folder), options, after]
    environment = os.environ | {"SPECGEN_CACHE": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def test_a_folder_from_which_nothing_may_run_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything compiled for it, or announced."""
    wanted = f"{tmp_path / 'kernels'} is mounted noexec|[]|[]"
    assert in_a_mount(tmp_path, "noexec,mode=700") in (wanted, None)

    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path))
    monkeypatch.setattr(library.os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC | 1))
    monkeypatch.setattr(library, "_loaded", cache(library._loaded.__wrapped__))
    said: list[str] = []
    library.prepare(said.append)
    assert f"{library.why_none()}|{said}|{[*tmp_path.glob('kernels/*')]}" == wanted


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_folder_that_cannot_be_written_is_a_reason(
    tmp_path: Path, has_folder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kernels"
    text = f"cannot write to {folder}" if has_folder else f"the folder {folder} cannot be made"
    wanted = f"{text}: Read-only file system"
    said = in_a_mount(tmp_path, "mode=700", "folder" if has_folder else "none")
    assert said is None or said.startswith(f"{wanted}|")

    def failing(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path))
    if has_folder:
        folder.mkdir(mode=0o700)
        monkeypatch.setattr(library.tempfile, "mkstemp", failing)
    else:
        monkeypatch.setattr(Path, "mkdir", failing)
    assert loaded() == (None, wanted)


def test_compiling_is_announced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the process that does it. Later calls, and later processes, load the file."""
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path))
    compiled = library_file()
    made: list[Path] = []

    def compile_(instructions: str, path: Path) -> None:
        made.append(path)
        shutil.copy(compiled, path)

    monkeypatch.setattr(library, "_compile", compile_)
    said: list[str] = []
    for _ in range(2):  # processes
        monkeypatch.setattr(library, "_loaded", cache(library._loaded.__wrapped__))
        for _ in range(2):
            library.prepare(said.append)
            assert library.kernels() is not None
    assert said == ["compiling kernels for this processor, once"]
    assert made == [tmp_path / "kernels" / compiled.name]


def test_a_profile_made_with_other_kernels_is_refused_with_its_reason(
    demo_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was fast with them need not be so with these."""
    now = library.kind()
    profiles.save(from_outcome(outcome(), profile_place.profile_key_of(demo_pair)), tmp_path)
    greedy = SamplingParams()
    found, why = profile_search.find(demo_pair, greedy, tmp_path)
    assert (found is not None, why) == (True, "")
    monkeypatch.setattr(library, "kind", lambda: "avx1")
    found, why = profile_search.find(demo_pair, greedy, tmp_path)
    assert found is None
    assert f"machine kernels was {now}, and is avx1; it is not used" in why


@posix
def test_pearls_process_loads_the_file_and_compiles_nothing(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler would say that it was called."""
    tools = tmp_path / "tools"
    tools.mkdir()
    called = tmp_path / "called"
    for name in library._COMPILERS:
        (tools / name).write_text(f"#!/bin/sh\n: > {called}\nexit 1\n")
        (tools / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tools))
    with specgen.load(*save_pair(tmp_path / "pair"), device="cpu", dtype="float32") as pair:
        pair.generate(PROMPT, "pearl", SamplingParams(max_new_tokens=4), window=2)
        worker = pair.models.worker()
        assert worker is not None
        process = worker.ready()._process  # type: ignore[union-attr]
        files = Path(f"/proc/{process.pid}/maps").read_text()
    assert str(kept) in files
    assert not called.exists()
