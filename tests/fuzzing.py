"""Runs `specgen` on generated cases (see `fuzz_cases`) and checks how it ends."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import typer.rich_utils  # noqa: F401  here, because it reads FORCE_COLOR once, as it is imported
from fuzz_cases import make_case
from fuzz_commands import Case
from fuzz_guard import Escaped, guarded
from fuzz_materials import Materials

import specgen
from specgen.cli.app import main

CODES = (0, 1, 2, 3, 130)
SECONDS = 60  # of a case; the longest takes under 2 on an idle machine
MEMORY = 6 << 30  # more than this at once is refused by the system, so that an absurd size fails as it does where memory is short
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
STYLES = re.compile(r"\x1b\[[\d;?]*[A-Za-z]|\r\n|\r")  # what Rich writes to a terminal
ANY_TRACEBACK = re.compile(r"Traceback|\b[A-Z]\w*(Error|Exception|Warning)\b|<class '| object at 0x|site-packages|--- Logging")


_READ = ("--prompts", "--corpus", "--profile", "--exit-layer", "--target", "--draft", "-t", "-d")
_END = b"the end of a FIFO"  # written by the fuzzer itself


_ERROR = re.compile("error: (?!cannot write )")  # several files may be unwritable


class Hung(BaseException):
    """The command ran for too long."""


@contextmanager
def _streams(case: Case, folder: Path) -> Iterator[tuple[Path, Path]]:
    """Standard output and error as files, below Python's streams too, and `case.stdin` as standard input."""
    encoding = "ascii" if case.environment.get("LC_ALL") in ("C", "POSIX") else "utf-8"
    paths = folder / "stdout", folder / "stderr"
    before, kept = (sys.stdin, sys.stdout, sys.stderr), [os.dup(1), os.dup(2)]
    for number, path in enumerate(paths, start=1):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
        os.close(descriptor)
    errors = {1: "strict", 2: "backslashreplace"}
    streams = [io.TextIOWrapper(os.fdopen(number, "wb", closefd=False), encoding, errors[number]) for number in (1, 2)]
    for stream in streams:
        stream.reconfigure(line_buffering=stream is streams[1])
        stream.isatty = lambda: case.is_terminal  # type: ignore[method-assign]
    sys.stdin = io.TextIOWrapper(io.BytesIO(case.stdin), encoding, "strict")
    sys.stdout, sys.stderr = streams
    try:
        yield paths
    finally:
        sys.stdin, sys.stdout, sys.stderr = before
        for stream in streams:
            with suppress(OSError, ValueError):
                stream.close()
        for number, descriptor in enumerate(kept, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)


@contextmanager
def _limits() -> Iterator[None]:
    """Ends the block with `Hung` after a minute, and refuses absurd amounts of memory."""

    def stop(*_: object) -> None:
        raise Hung

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if sys.platform == "linux" else None
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    if used is not None:
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _environment(case: Case) -> dict[str, str]:
    """This process's environment with the case's variables, and without those that are None there."""
    folders = {"SPECGEN_DATA": "data", "SPECGEN_CACHE": "cache", "HOME": "home"}
    changed = {**os.environ, **{name: str(case.folder / folder) for name, folder in folders.items()}, **case.environment}
    return {name: value for name, value in changed.items() if value is not None}


@contextmanager
def _in_folder(case: Case) -> Iterator[list[str]]:
    """The case's working folder and environment, writes elsewhere forbidden, PEARL's draft in a thread, short tunings allowed."""
    folder, here, temporary = case.folder, Path.cwd(), tempfile.tempdir
    bytecode = sys.dont_write_bytecode
    with ExitStack() as opened:
        opened.enter_context(mock.patch.dict(os.environ, _environment(case), clear=True))
        opened.enter_context(mock.patch("specgen.workers.process.is_possible", return_value=False))
        opened.enter_context(mock.patch("specgen.pair.loading.is_possible", return_value=False))
        opened.enter_context(mock.patch("specgen.cli.tune_run.LEAST_BUDGET", 0.1))
        try:
            os.chdir(folder)
            tempfile.tempdir = str(folder / "tmp")
            sys.dont_write_bytecode = True
            with guarded(folder) as escaped:
                yield escaped
        finally:
            sys.dont_write_bytecode, tempfile.tempdir = bytecode, temporary
            os.chdir(here)


@contextmanager
def _shown_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """The warnings that Python would print, which are too many."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        yield warned


def run(case: Case, *, alone: bool = False) -> list[str]:
    """Runs a case: in this process, or `alone` in one of its own, with Python's own start and end, where PEARL's draft has a
    process too. Returns what is wrong with how it ended; an empty list if nothing is."""
    before, kept = _state(case), _resumed(case)
    threads = set(threading.enumerate())
    with _read_fifo(case.folder / "out" / "fifo"):
        code, problems = _run_alone(case) if alone else _run_here(case)
    out, err = ((case.folder.parent / name).read_bytes() for name in ("stdout", "stderr"))
    if not problems:
        problems = _wrong_end(case, code, out, err)
    after = _state(case)
    problems += [f"changed or made {path}" for path, state in after.items() if before.get(path) != state]
    problems += [f"{'replaced' if os.path.lexists(path) else 'removed'} {path}" for path in before if path not in after]
    problems += [
        f"{path} lost what it recorded" for path, data in kept.items() if path.exists() and not path.read_bytes().startswith(data)
    ]
    problems += [f"left the thread {thread.name}" for thread in set(threading.enumerate()) - threads if not thread.daemon]
    return problems


def _run_here(case: Case) -> tuple[Any, list[str]]:
    """Runs the command in this process. Returns its exit code and what went wrong."""
    problems: list[str] = []
    code = None
    with _streams(case, case.folder.parent), _in_folder(case) as escaped, _shown_warnings() as warned:
        before, sys.argv = sys.argv, ["specgen", *case.args]
        try:
            with _limits():
                main()
        except SystemExit as ended:
            code = ended.code
        except Hung:
            problems.append("still runs: " + traceback.format_exc(limit=-6))
        except Escaped:
            pass
        except BaseException:  # noqa: BLE001
            problems.append(traceback.format_exc(limit=-8))
        finally:
            sys.argv = before
    problems += [f"wrote outside its folder: {what}" for what in escaped]
    return code, problems + [f"the warning {each.message}" for each in warned]


def _run_alone(case: Case) -> tuple[Any, list[str]]:
    """Runs the command as a program. Returns its exit code, below 0 for a signal, and what went wrong."""
    folder = case.folder.parent
    command = [sys.executable, str(Path(__file__).with_name("fuzz_guard.py")), str(case.folder), str(2 * MEMORY), *case.args]
    own = {"PYTHONPATH": str(Path(specgen.__file__).parents[1]), "TMPDIR": str(case.folder / "tmp")}
    environment = {**_environment(case), **own, "TORCHINDUCTOR_CACHE_DIR": str(case.folder / "tmp")}  # torch set it here
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        try:
            ended = subprocess.run(
                command,
                input=case.stdin,
                stdout=out,
                stderr=err,
                env=environment,
                cwd=case.folder,
                timeout=2 * SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, ["still runs"]
    case.is_terminal = False
    found = folder / "escaped"
    return ended.returncode, [f"wrote outside its folder: {found.read_text()}"] if found.exists() else []


@contextmanager
def _read_fifo(path: Path) -> Iterator[None]:
    """Reads what is written to a FIFO, and keeps it open, so that no writer waits."""
    descriptor = os.open(path, os.O_RDWR) if path.is_fifo() else os.open(os.devnull, os.O_RDWR)

    def read() -> None:
        last = b""
        while last != _END and (data := os.read(descriptor, 1 << 16)):
            last = (last + data)[-len(_END) :]

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(descriptor, _END)
        thread.join()
        os.close(descriptor)


def _resumed(case: Case) -> dict[Path, bytes]:
    """The files of --resume with their complete lines, which have to stay."""
    paths = [Path(value) for option, value in pairwise(case.args) if option == "--resume" and len(value) < 200]
    found = {path: path.read_bytes() for path in (case.folder / path for path in paths) if path.is_file()}
    return {path: data[: max(0, data.rfind(b'{"type": "start"'))] for path, data in found.items()}  # the last may be incomplete


def _state(case: Case) -> dict[str, tuple[int, ...]]:
    """Every file that the case may not change, with its inode, size and time. Of a device, a FIFO and a link to write to, only
    the inode: what it is has to stay."""
    is_read = _READ.__contains__ if case.args[:1] != ["inspect"] else "--html".__ne__
    read = {
        os.path.realpath(case.folder / value) for option, value in pairwise(case.args) if is_read(option) and len(value) < 4000
    }
    allowed = {os.path.realpath(path) for path in case.outputs if len(str(path)) < 4000} - (set() if case.is_loose else read)
    allowed |= {str(case.folder / name) for name in ("data", "cache", "home", "tmp")}
    own = [Path(folder) / name for folder, names, files in os.walk(case.folder) for name in (*names, *files)]
    shared = [file for folder in case.materials.folders for file in folder.iterdir()]
    found = {}
    for path in (*own, *shared):
        real, status = os.path.realpath(path), path.lstat()
        is_allowed = any(real == one or real.startswith(f"{one}/") for one in allowed)
        is_allowed |= path.is_dir() and any(one.startswith(f"{real}/") for one in allowed)  # made for an output in it
        if not is_allowed or not (path.is_file() or path.is_dir()) or path.is_symlink():
            is_compared = path.is_file() and not is_allowed
            found[str(path)] = (status.st_ino, status.st_mode, *((status.st_size, status.st_mtime_ns) if is_compared else ()))
    return found


def _wrong_end(case: Case, code: Any, out: bytes, err: bytes) -> list[str]:
    problems, is_terminal = [], case.is_terminal or "FORCE_COLOR" in case.environment
    if code not in CODES or isinstance(code, bool):
        problems.append(f"the exit code is {code!r}")
    try:
        text, errors = out.decode(), err.decode()
    except UnicodeDecodeError as error:
        return [f"the output is not UTF-8: {error}"]
    if ANY_TRACEBACK.search(errors):
        problems.append("a traceback or an error's type on stderr")
    lines, reports = errors.splitlines(), "--rounds" in case.args or "tune" in case.args  # they report on stderr
    if code in (1, 2) and not is_terminal and case.args:  # without arguments it shows the help
        if not lines or not lines[-1].startswith("error: "):
            problems.append("no message of an error")
        elif (len(lines) > 3 and not reports) or len([line for line in lines if _ERROR.match(line)]) > 1:
            problems.append(f"{len(lines)} lines on stderr")
        if any(len(line) > 1100 for line in lines):
            problems.append("a message of more than 1,100 characters")
    if code == 2 and text and case.args[:1] not in ([], ["inspect"]):  # inspect has shown the lines before the wrong one
        problems.append("text on stdout")
    for name, shown in (("stdout", text), ("stderr", errors)):
        left = STYLES.sub("", shown) if is_terminal else shown
        is_read_by_programs = name == "stdout" and not is_terminal and case.args[:1] == ["generate"]
        if not is_read_by_programs and (found := CONTROL.search(left)):
            around = left[max(0, found.start() - 30) : found.end() + 30]
            problems.append(f"the control character {found[0]!r} on {name}: {around!r}")
    shown_instead = {"--help", "-h", "--version", "--help-method", "--export"}
    if "--json" in case.args and not case.is_loose and not shown_instead & set(case.args):
        problems += _wrong_json(text)
    return problems


def _wrong_json(text: str) -> list[str]:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    for line in text.splitlines():
        try:
            json.loads(line, parse_constant=refuse)
        except (ValueError, RecursionError) as error:
            return [f"not JSON: {error}: {line[:100]!r}"]
    return []


def _report(case: Case, seed: int, number: int, problems: list[str], streams: Path, *, alone: bool) -> str:
    """A report of a failed case, with the command that repeats it."""
    args = [arg if len(arg) < 200 else f"{arg[:60]}…({len(arg):,} characters)" for arg in case.args]
    err = (streams / "stderr").read_text(encoding="utf-8", errors="replace")
    return (
        f"== {case.part} {number}: specgen {args!r}\n   environment {case.environment} terminal {case.is_terminal}"
        f" stdin {case.stdin[:50]!r}\n" + "\n".join(problems) + f"\n   stderr: {err[-1500:]!r}\n"
        f"   repeat: python tests/fuzz.py --part {case.part} --seed {seed} --number {number}{' --alone' if alone else ''}"
    )


def run_number(
    part: str, seed: int, number: int, materials: Materials, *, alone: bool = False, keep: Path | None = None
) -> str | None:
    """Makes and runs one case in a temporary folder. Returns the report of a failure, None if it ended as it should. `alone`: see
    `run`; `keep`: copies the case's files there."""
    root = Path(tempfile.mkdtemp(prefix="specgen-fuzz-"))
    try:
        case = make_case(part, seed, number, root / "case", materials)
        problems = run(case, alone=alone)
        if keep is not None:
            shutil.copytree(root, keep, symlinks=True, ignore=shutil.ignore_patterns("dev"))
        return _report(case, seed, number, problems, root, alone=alone) if problems else None
    finally:
        shutil.rmtree(root, ignore_errors=True)
