"""The process that renders chat templates: one for many renderings, limits for each of them, and nothing left at its end."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_helpers import POSIX, run_main
from processes import is_running, wait_until
from tokenizer_helpers import LLAMA, byte_level, load, write

from specgen.engine.text import chat_template, template_process
from specgen.engine.text.template_process import LIMITS, Limits, TemplateError, TemplateProcess

pytestmark = POSIX
CONTENT = "{{ messages[0].content }}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
LONG_POWER = "{{ (9 ** (9 ** 9)) % 2 }}"  # one operation, in which Python handles no signals
DOUBLED = "{% set n = namespace(s='a') %}{% for _ in range(25) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s | length }}"
MIB = 1 << 20
WhileRendering = Callable[[Callable[[], object]], None]
SLOW_MACHINE = 100.0  # seconds, where another limit is tested


def text_of(process: TemplateProcess, content: str = "x", template: str = CONTENT) -> str:
    return process.render(template, [{"role": "user", "content": content}], {})


class Started(list[int]):
    """The ids of the processes that were started."""

    def left(self) -> list[int]:
        """Those that run, or have ended and were not waited for."""
        return [pid for pid in self if Path(f"/proc/{pid}").exists()]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Records every process for templates that is started."""
    pids = Started()

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, command: Any, **options: Any) -> None:
            super().__init__(command, **options)
            if "chat_template.py" in str(command):
                pids.append(self.pid)

    monkeypatch.setattr(template_process.subprocess, "Popen", Recorded)
    return pids


@pytest.fixture
def process(started: Started) -> Iterator[TemplateProcess]:
    descriptors = set(os.listdir("/proc/self/fd"))
    made = TemplateProcess(Limits(seconds=SLOW_MACHINE))
    yield made
    made.close()
    assert started.left() == []
    assert set(os.listdir("/proc/self/fd")) <= descriptors


def test_many_renderings_start_one_process_at_the_first(tmp_path: Path, started: Started) -> None:
    tokenizer = load(write(tmp_path, byte_level(), {"chat_template": CONTENT}, LLAMA))
    assert started == []
    made = [tokenizer.chat(f"text {number}", None) for number in range(20)]
    assert made == [tokenizer.encode(f"text {number}") for number in range(20)]
    assert len(started) == 1
    alive = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert alive() is None
    assert started.left() == [], "it ends with its owner"


def test_errors_of_a_template_do_not_end_its_process(process: TemplateProcess, started: Started) -> None:
    for template, why in (("{% if", "unexpected 'end of template'"), ("{{ 1 / 0 }}", "division by zero"), ("{{ a.b.c }}", "'a'")):
        with pytest.raises(TemplateError, match=why):
            text_of(process, template=template)
        assert text_of(process, "é 日本 \ud83d") == "é 日本 \ud83d"
    with pytest.raises(TemplateError, match=r"^a{100}$"):
        text_of(process, template="{{ raise_exception('a' * 100) }}")
    assert len(started) == 1


@pytest.mark.parametrize(
    ("template", "small", "why", "large", "text"),
    [
        (DOUBLED, Limits(SLOW_MACHINE, memory=16 * MIB), "it needs more than 16 MiB of memory", LIMITS, str(1 << 25)),
        ("{{ 'a' * 10**11 }}", Limits(SLOW_MACHINE, memory=32 * MIB), "it needs more than 32 MiB of memory", None, ""),
        ("{{ 'a' * 1048577 }}", Limits(SLOW_MACHINE, characters=MIB), "it makes more than 1 MiB of text", LIMITS, "a" * 1048577),
        (ENDLESS, Limits(0.2), "it takes more than 0.2 seconds", None, ""),
        (LONG_POWER, Limits(0.2), "it takes more than 0.2 seconds", None, ""),
    ],
    ids=["memory", "allocation", "text", "loop", "power"],
)
def test_a_rendering_that_exceeds_a_limit_ends_the_process(
    started: Started, template: str, small: Limits, why: str, large: Limits | None, text: str
) -> None:
    process = TemplateProcess(small)
    with pytest.raises(TemplateError, match=f"^{why}$"):
        text_of(process, template=template)
    assert started.left() == []
    assert process._process is None
    process._limits = Limits(SLOW_MACHINE)
    assert text_of(process) == "x"
    assert len(started) == 2
    process.close()
    if large is not None:
        process = TemplateProcess(large)
        assert text_of(process, template=template) == text
        process.close()
    assert started.left() == []


def test_a_text_of_the_largest_size_is_rendered(process: TemplateProcess) -> None:
    process._limits = Limits(SLOW_MACHINE, characters=MIB)
    assert text_of(process, template="{{ '\U0001f600' * 1048576 }}") == "\U0001f600" * MIB


def test_a_process_that_keeps_much_memory_is_replaced(process: TemplateProcess, started: Started) -> None:
    """Else the next rendering would have less than its limit."""
    process._limits = Limits(SLOW_MACHINE, memory=32 * MIB)
    assert len(text_of(process, template="{{ 'a' * 4500000 }}")) == 4_500_000
    assert text_of(process) == "x"
    assert len(started) == 2


def test_a_killed_process_is_replaced(process: TemplateProcess, started: Started) -> None:
    text_of(process)
    os.kill(started[0], signal.SIGKILL)
    os.waitid(os.P_PID, started[0], os.WEXITED | os.WNOWAIT)
    assert text_of(process, "again") == "again"
    assert len(started) == 2
    assert started.left() == started[1:]
    process.close()
    assert text_of(process, "after close") == "after close"


@pytest.fixture
def while_rendering(monkeypatch: pytest.MonkeyPatch) -> WhileRendering:
    """Makes the next rendering start a thread that calls a function soon after the process was started."""
    exchange = template_process._line_after

    def prepared(act: Callable[[], object]) -> None:
        def line_after(*arguments: Any) -> bytes:
            monkeypatch.setattr(template_process, "_line_after", exchange)
            threading.Timer(0.05, act).start()
            return exchange(*arguments)

        monkeypatch.setattr(template_process, "_line_after", line_after)

    return prepared


def test_a_process_that_ends_while_it_renders_is_reported(
    process: TemplateProcess, started: Started, while_rendering: WhileRendering
) -> None:
    process.start()
    os.kill(started[0], signal.SIGSTOP)
    while_rendering(lambda: os.kill(started[0], signal.SIGKILL))
    with pytest.raises(TemplateError, match=r"^its process ended with code -9$"):
        text_of(process, "a" * 1_000_000)  # more than the pipe takes
    assert text_of(process) == "x"


def test_ctrl_c_while_a_template_is_rendered_leaves_nothing(
    process: TemplateProcess, started: Started, while_rendering: WhileRendering
) -> None:
    main = threading.main_thread().ident
    assert main is not None
    while_rendering(lambda: signal.pthread_kill(main, signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            text_of(process, template=ENDLESS)
    finally:
        signal.signal(signal.SIGINT, before)
    assert started.left() == []
    assert text_of(process) == "x"


def test_closing_ends_a_rendering_of_another_thread(process: TemplateProcess, while_rendering: WhileRendering) -> None:
    while_rendering(process.close)
    with pytest.raises(TemplateError, match="code -9"):
        text_of(process, template=ENDLESS)


def test_several_threads_use_one_process(process: TemplateProcess, started: Started) -> None:
    texts = [str(number) * 20_000 for number in range(40)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda text: text_of(process, text), texts)) == texts
    assert len(started) == 1


PARENT = """
import json, os, sys, threading
from specgen.engine.text.template_process import Limits, TemplateProcess
doing, seconds = sys.argv[1], float(sys.argv[2])
process, messages = TemplateProcess(Limits(seconds)), [{"role": "user", "content": "x"}]
def show():
    print(os.getpid(), process._process.pid, flush=True)
def render():
    assert process.render("{{ messages[0].content }}", messages, {}) == "x"
    show()
if doing == "exit":
    render()
elif doing == "fork":
    render()
    threading.Thread(target=process._lock.acquire, daemon=True).start()  # it does not exist in the fork
    while not process._lock.locked(): pass
    if os.fork() == 0:
        render()
        sys.stdin.read()
        sys.exit()
    sys.stdin.read()
else:
    process.start()
    process._process.stdin.write(json.dumps([doing, messages, {}]).encode() + b"\\n")
    show()
    sys.stdin.read()
"""


@contextmanager
def parent(doing: str, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """A process that uses a TemplateProcess. It and what it forked are killed at the end, or after a minute."""
    command = [sys.executable, "-c", PARENT, doing, str(seconds)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, start_new_session=True, **pipes) as started:

        def kill() -> None:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)

        timer = threading.Timer(60, kill)
        timer.start()
        try:
            yield started
        finally:
            timer.cancel()
            kill()


def test_it_ends_with_the_interpreter() -> None:
    with parent("exit", SLOW_MACHINE) as ended:
        out, err = ended.communicate()
    assert err == b""
    assert not Path(f"/proc/{out.split()[1].decode()}").exists()


def test_a_forked_process_has_its_own_and_does_not_keep_its_parents_alive() -> None:
    with parent("fork", SLOW_MACHINE) as first:
        assert first.stdout is not None
        assert first.stdin is not None
        (own, process), (forked, other) = ([int(text) for text in first.stdout.readline().split()] for _ in range(2))
        assert own == first.pid
        assert is_running(process)
        assert len({own, process, forked, other}) == 4
        first.kill()
        first.wait()
        assert wait_until(lambda: not is_running(process)), "it ends when its parent is killed"
        assert is_running(other)
        assert is_running(forked)
        first.stdin.close()
        assert wait_until(lambda: not is_running(other) and not is_running(forked))


@pytest.mark.parametrize("template", [ENDLESS, LONG_POWER], ids=["loop", "power"])
def test_a_rendering_without_end_ends_some_time_after_its_parent_was_killed(template: str) -> None:
    with parent(template, 0.2) as first:
        assert first.stdout is not None
        process = int(first.stdout.readline().split()[1])
        first.kill()
        first.wait()
        assert wait_until(lambda: not is_running(process))


def test_its_own_timer_runs_while_it_renders_only(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[float] = []
    monkeypatch.setattr(chat_template, "_set_timer", timers.append)
    monkeypatch.setattr(chat_template, "_limit_address_space", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["chat_template.py", "3", str(MIB), str(MIB)])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b'["x", [], {}]\n["{{ 1 / 0 }}", [], {}]\n')))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=(out := io.BytesIO())))
    chat_template.main()
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"is_last": False, "text": "x"},
        {"is_last": False, "error": "division by zero"},
    ]
    assert timers == [6, 0, 6, 0]


def test_generate_starts_it_before_it_loads_models_and_ends_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], pair: tuple[str, ...], started: Started
) -> None:
    from specgen.pair import loading

    load_pair, before = loading.load, []
    monkeypatch.setattr(loading, "load", lambda *args, **options: (before.extend(started), load_pair(*args, **options))[1])
    command = ("generate", "abc", "-m", "ar", "-n", "3", "-q", *pair[:2], "--device", "cpu")
    assert run_main(monkeypatch, capfd, *command)[0] == 0
    assert started == []
    assert run_main(monkeypatch, capfd, *command, "--chat")[0] == 0
    assert len(before) == 1
    assert started == before
    assert started.left() == []
