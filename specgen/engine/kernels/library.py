"""The library of kernels: compiled from `kernels.c` by the machine's C compiler when first needed,
kept in the folder of caches, and loaded.

Loading a library is running code. So the folder must belong to the user, and nobody else may be
able to write to it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from specgen.base.errors import SpecgenError
from specgen.base.files import cache_folder

SOURCE = Path(__file__).with_name("kernels.c")
VARIABLE = "SPECGEN_KERNELS"

_FLAGS = (
    "-O2",
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # which products and sums are contracted must not depend on the compiler
    "-fno-math-errno",
    "-fno-trapping-math",
)
_OF_AMD = ("-DFETCH_INTO_L2",)  # for processors of AMD
_COMMON = ("-mavx2", "-mfma", "-mf16c")
_SECONDS = 300  # that a compiler may take
_COMPILERS = ("cc", "gcc", "clang")

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_long
_INT = ctypes.c_int
_FLOAT = ctypes.c_float
_ARGUMENTS = {
    "set_threads": [_INT],
    "lanes": [],
    "product": [
        _POINTER,
        *(_POINTER, _LONG, _LONG),
        *(_POINTER, _FLOAT, _INT),
        *(_POINTER, _LONG),
    ],
    "rms_norm": [
        *(_POINTER, _LONG, _LONG, _LONG, _LONG),
        *(_POINTER, _LONG, _FLOAT),
        *(_POINTER, _LONG),
    ],
    "rotate_and_write": [
        *(_POINTER, _LONG, _LONG, _LONG, _LONG, _LONG),
        *(_POINTER, _LONG, _LONG),
        *(_LONG, _POINTER, _POINTER, _LONG),
    ],
    "attention": [
        *(_POINTER, _LONG, _LONG, _LONG, _LONG, _LONG),
        *(_POINTER, _POINTER, _LONG),
        *(_POINTER, _POINTER),
        *(_FLOAT, _FLOAT, _POINTER),
        *(_POINTER, _LONG),
    ],
    "gated": [_POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER, _LONG],
    "likeliest": [_POINTER, _LONG, _LONG, _LONG, _POINTER],
    "statistics": [_POINTER, _LONG, _POINTER],
    "dots": [_POINTER, _LONG, _LONG, _POINTER, _POINTER],
    "run_branches": [
        *(_POINTER, _LONG),
        *(_POINTER, _LONG, _LONG),
        *(_POINTER, _LONG, _POINTER, _LONG, _LONG),
        _POINTER,
    ],
    "run_pass": [_POINTER],
    "grouped_product": [_POINTER, _LONG, _POINTER, _LONG, *(_POINTER, _LONG) * 2],
    "weighted_sums": [*(_POINTER, _LONG), _POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER],
    "clamped_gated": [_POINTER, _LONG, _LONG, _FLOAT, _FLOAT, _POINTER],
}


@dataclass(frozen=True, slots=True)
class Instructions:
    """A set of instructions: the processor's `features` (as Linux names them) that it needs, and
    the compiler's `flags`."""

    features: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"})
# the best first
INSTRUCTIONS = {
    "avx512": Instructions(
        _AVX2 | _AVX512,
        (*_COMMON, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"),
    ),
    "avxvnni": Instructions(_AVX2 | {"avx_vnni"}, (*_COMMON, "-mavxvnni")),
    "avx2": Instructions(_AVX2, _COMMON),
}


class UnavailableError(Exception):
    """Kernels cannot be used here; the text says why."""


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded kernels for one set of `instructions`. `functions` has C's functions; their
    arguments are described in `kernels.c`. `lanes` is the number of floats in a vector."""

    instructions: str
    functions: ctypes.CDLL
    lanes: int


def kernels() -> Library | None:
    """Returns the kernels; None where there are none: `why_none` says why. The first call may
    compile them.

    Raises SpecgenError if the environment variable `SPECGEN_KERNELS` names no kind, or one that
    this processor cannot run.
    """
    return _loaded()[0]


def why_none() -> str | None:
    """Returns why `kernels` has none, as the end of a sentence; None if it has."""
    return _loaded()[1]


def kind() -> str:
    """Returns the set of instructions of the kernels; `torch` where there are none."""
    library = kernels()
    return "torch" if library is None else library.instructions


def prepare(announce: Callable[[str], None]) -> None:
    """Loads the kernels. If they have to be compiled first, which takes some seconds, calls
    `announce` with a sentence about it. Raises SpecgenError as `kernels` does."""
    is_loaded = _loaded.cache_info().currsize > 0
    if not is_loaded and _must_compile():
        announce("compiling kernels for this processor, once")
    kernels()


def _must_compile() -> bool:
    try:
        return not _path(_chosen()).exists()
    except UnavailableError:
        return False


@cache
def _loaded() -> tuple[Library | None, str | None]:
    try:
        return _load(_chosen()), None
    except UnavailableError as reason:
        return None, str(reason)


def available_instructions() -> list[str]:
    """Returns the sets of instructions that this processor has, the best first."""
    features = _features()
    return [name for name, needed in INSTRUCTIONS.items() if needed.features <= features]


@cache
def _features() -> frozenset[str]:
    """Returns what Linux says that all processors of this machine have."""
    flags = [set(line.partition(":")[2].split()) for line in _cpuinfo() if line.startswith("flags")]
    return frozenset(set.intersection(*flags)) if flags else frozenset()


@cache
def _cpuinfo() -> list[str]:
    """Returns the lines in which Linux describes the processors."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _flags(instructions: str) -> list[str]:
    """Returns the compiler's flags for a set of instructions on this machine."""
    is_amd = any("AuthenticAMD" in line for line in _cpuinfo() if line.startswith("vendor_id"))
    return [*_FLAGS, *INSTRUCTIONS[instructions].flags, *(_OF_AMD if is_amd else ())]


def _chosen() -> str:
    """Returns the set of instructions to use.

    Raises UnavailableError if there are no kernels for this machine, SpecgenError for an impossible
    wish.
    """
    wish = os.environ.get(VARIABLE, "")
    kinds = ("torch", *INSTRUCTIONS)
    if wish and wish not in kinds:
        raise SpecgenError(f"{VARIABLE}={wish} is unknown", f"Take one of {', '.join(kinds)}")
    if wish == "torch":
        raise UnavailableError(f"{VARIABLE} is torch")
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise UnavailableError(f"there are none for {sys.platform} on {platform.machine()}")
    available = available_instructions()
    if wish and wish not in available:
        raise SpecgenError(
            f"{VARIABLE}={wish}: this processor lacks these instructions",
            f"Take one of {', '.join(['torch', *available])}, or unset it",
        )
    if not available:
        raise UnavailableError("this processor has no AVX2")
    return wish or available[0]


def _load(instructions: str) -> Library:
    """Returns the kernels for a set of instructions, compiled if they were not compiled before.

    Raises UnavailableError if they cannot be compiled, kept or loaded.
    """
    path = _path(instructions)
    if not path.exists():
        _compile(instructions, path)
    _check_owner(path)
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnavailableError(f"{path} cannot be loaded: {error}") from error
    for name, arguments in _ARGUMENTS.items():
        function = getattr(functions, name)
        function.argtypes = arguments
        function.restype = None if name == "set_threads" else _INT
    return Library(instructions, functions, functions.lanes())


def _path(instructions: str) -> Path:
    """Returns where the library for a set of instructions is kept. Its name depends on text and
    flags."""
    flags = " ".join(_flags(instructions))
    digest = sha256(SOURCE.read_bytes() + flags.encode()).hexdigest()[:16]
    return _folder() / f"{instructions}-{digest}.so"


def _folder() -> Path:
    """Returns the folder of compiled kernels, which is made if it is missing.

    Raises UnavailableError if it belongs to another user, if others may write to it, or if no
    program may run from it.
    """
    folder = cache_folder() / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UnavailableError(f"the folder {folder} cannot be made: {error.strerror}") from error
    _check_owner(folder.parent)
    _check_owner(folder)
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise UnavailableError(f"{folder} is mounted noexec")
    return folder


def _check_owner(path: Path) -> None:
    """Raises UnavailableError if `path` is a symbolic link or belongs to another user, or if others
    may write to it."""
    try:
        status = path.lstat()
    except OSError as error:
        raise UnavailableError(f"{path} cannot be read: {error.strerror}") from error
    if stat.S_ISLNK(status.st_mode):
        raise UnavailableError(f"{path} is a symbolic link")
    if status.st_uid != os.getuid():
        raise UnavailableError(f"{path} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnavailableError(f"other users may write to {path}")


def find_compiler() -> str | None:
    """Returns the path of the machine's C compiler, None if there is none."""
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


def _compile(instructions: str, path: Path) -> None:
    """Compiles the kernels to `path`, which is complete or missing at any time. Another process
    that does the same meanwhile does no harm."""
    compiler = find_compiler()
    if compiler is None:
        raise UnavailableError("there is no C compiler (cc)")
    try:
        descriptor, part = tempfile.mkstemp(dir=path.parent, suffix=".part")
    except OSError as error:
        raise UnavailableError(f"cannot write to {path.parent}: {error.strerror}") from error
    os.close(descriptor)
    try:
        command = [compiler, *_flags(instructions), "-o", part, str(SOURCE), "-lm"]
        done = subprocess.run(  # noqa: S603 (a compiler that is found in PATH)
            command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
        if done.returncode != 0:
            first_line = next(iter(done.stderr.strip().splitlines()), "it says nothing")
            raise UnavailableError(f"the compiler {compiler} failed: {first_line}")
        os.chmod(part, 0o700)
        os.replace(part, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"the compiler {compiler} failed: {error}") from error
    finally:
        Path(part).unlink(missing_ok=True)
