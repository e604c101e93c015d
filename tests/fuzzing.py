"""Runs `specgen` in this process on generated cases (see `fuzz_cases`) and checks how it ends."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from fuzz_cases import make_case
from fuzz_commands import Case
from fuzz_materials import Materials

from specgen.cli.app import main

CODES = (0, 1, 2, 3, 130)
SECONDS = 60  # of a case; the longest takes under 2 on an idle machine
MEMORY = 6 << 30  # more than this at once is refused by the system, so that an absurd size fails as it does where memory is short
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
STYLES = re.compile(r"\x1b\[[\d;?]*[A-Za-z]|\r\n|\r")  # what Rich writes to a terminal
ANY_TRACEBACK = re.compile(r"Traceback|\b[A-Z]\w*(Error|Exception|Warning)\b|<class '| object at 0x|site-packages|--- Logging")


class Escaped(BaseException):
    """The command was about to write outside its folder. It is prevented, not only reported."""


class Hung(BaseException):
    """The command ran for too long."""


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = dict.fromkeys(("os.rename", "os.link", "os.symlink", "shutil.move"), 2)  # how many paths each of them changes
_CHANGES |= dict.fromkeys(
    ["os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "os.chown", "os.utime", "shutil.rmtree"], 1
)
_guarded: list[tuple[Path, list[str]]] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    """Python calls this before each of these operations, in whatever module it is."""
    if not _guarded:
        return
    if event == "open":
        written = args[:1] if isinstance(args[2], int) and args[2] & _WRITES else ()
    elif event == "socket.connect":
        written = ("/the network",) if isinstance(args[1], tuple) else ()
    else:
        written = args[: _CHANGES.get(event, 0)]
    root, found = _guarded[-1]
    for path in written:
        if isinstance(path, int):
            continue
        real = os.path.realpath(os.fsdecode(path))
        if not (real.startswith(f"{root}/") or real in ("/dev/null", str(root))) or "/in/model/" in real:
            found.append(f"{event} {real}")
            raise Escaped(found[-1])


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


@contextmanager
def _in_folder(case: Case) -> Iterator[list[str]]:
    """The case's working folder and environment, writes elsewhere forbidden, PEARL's draft in a thread, short tunings allowed."""
    if _audit not in _installed:
        sys.addaudithook(_audit)
        _installed.append(_audit)
    folder, here, temporary = case.folder, Path.cwd(), tempfile.tempdir
    environment = {"SPECGEN_DATA": folder / "data", "SPECGEN_CACHE": folder / "cache", "HOME": folder / "home"}
    escaped: list[str] = []
    bytecode = sys.dont_write_bytecode
    with ExitStack() as opened:
        opened.enter_context(mock.patch.dict(os.environ, {name: str(path) for name, path in environment.items()}))
        opened.enter_context(mock.patch.dict(os.environ, case.environment))
        opened.enter_context(mock.patch("specgen.workers.process.is_possible", return_value=False))
        opened.enter_context(mock.patch("specgen.loading.is_possible", return_value=False))
        opened.enter_context(mock.patch("specgen.cli.tune_run.LEAST_BUDGET", 0.1))
        try:
            os.chdir(folder)
            tempfile.tempdir = str(folder / "tmp")
            sys.dont_write_bytecode = True
            _guarded.append((folder.resolve(), escaped))
            yield escaped
        finally:
            _guarded.pop()
            sys.dont_write_bytecode, tempfile.tempdir = bytecode, temporary
            os.chdir(here)


_installed: list[Any] = []


@contextmanager
def _shown_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """The warnings that Python would print, which are too many."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        yield warned


def run(case: Case) -> list[str]:
    """Runs a case. Returns what is wrong with how it ended; an empty list if nothing is."""
    unchanged = _state(case)
    problems, code = [], None
    threads = set(threading.enumerate())
    with _streams(case, case.folder.parent) as paths, _in_folder(case) as escaped, _shown_warnings() as warned:
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
    problems += [f"the warning {each.message}" for each in warned]
    out, err = (path.read_bytes() for path in paths)
    if not problems:
        problems += _wrong_end(case, code, out, err)
    changed = [path for path, state in _state(case).items() if unchanged.get(path) != state]
    problems += [f"changed or made {path}" for path in changed]
    problems += [f"removed {path}" for path in unchanged if not os.path.lexists(path)]
    problems += [f"left the thread {thread.name}" for thread in set(threading.enumerate()) - threads if not thread.daemon]
    return problems


def _state(case: Case) -> dict[str, tuple[int, ...]]:
    """Every file that the case may not change, with its inode, size and time."""
    allowed = {os.path.realpath(path) for path in case.outputs if len(str(path)) < 4000}
    allowed |= {str(case.folder / name) for name in ("data", "cache", "home", "tmp")}
    own = [Path(folder) / name for folder, names, files in os.walk(case.folder) for name in (*names, *files)]
    shared = [file for folder in case.materials.folders for file in folder.iterdir()]
    found = {}
    for path in (*own, *shared):
        real = os.path.realpath(path)
        if not any(real == one or real.startswith(f"{one}/") for one in allowed):
            status = path.lstat()
            found[str(path)] = (status.st_ino, status.st_mode, *((status.st_size, status.st_mtime_ns) if path.is_file() else ()))
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
        elif (len(lines) > 3 and not reports) or sum(line.startswith("error: ") for line in lines) > 1:
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


def told(case: Case, seed: int, number: int, problems: list[str], streams: Path) -> str:
    """A report of a failed case, with the command that repeats it."""
    args = [arg if len(arg) < 200 else f"{arg[:60]}…({len(arg):,} characters)" for arg in case.args]
    err = (streams / "stderr").read_text(encoding="utf-8", errors="replace")
    return (
        f"== {case.part} {number}: specgen {args!r}\n   environment {case.environment} terminal {case.is_terminal}"
        f" stdin {case.stdin[:50]!r}\n" + "\n".join(problems) + f"\n   stderr: {err[-1500:]!r}\n"
        f"   repeat: python tests/fuzz.py --part {case.part} --seed {seed} --number {number}"
    )


def run_number(part: str, seed: int, number: int, materials: Materials, *, keep: Path | None = None) -> str | None:
    """Makes and runs one case in a temporary folder. Returns the report of a failure, None if it ended as it should."""
    root = Path(tempfile.mkdtemp(prefix="specgen-fuzz-"))
    try:
        case = make_case(part, seed, number, root / "case", materials)
        problems = run(case)
        if keep is not None:
            shutil.copytree(root, keep, symlinks=True, ignore=shutil.ignore_patterns("dev"))
        return told(case, seed, number, problems, root) if problems else None
    finally:
        shutil.rmtree(root, ignore_errors=True)
