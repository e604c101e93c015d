"""Ctrl-C waits while a round is shown and recorded, and only the first one does."""

from __future__ import annotations

import os
import signal

import pytest
import typer

from specgen.cli.error_reporting import INTERRUPTED, reported
from specgen.cli.interrupts import Interrupts, interrupt_watch
from specgen.errors import SpecgenError


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_one_waits_until_the_round_is_done() -> None:
    done = []
    with Interrupts() as interrupts:
        held = interrupts.held()
        held.__enter__()
        press()
        done.append("shown")
        with pytest.raises(KeyboardInterrupt):
            held.__exit__(None, None, None)
    assert done == ["shown"]


def test_the_second_one_does_not_wait() -> None:
    with Interrupts() as interrupts, interrupts.held():
        press()
        with pytest.raises(KeyboardInterrupt):
            press()
        interrupts._pending = False


def test_between_rounds_it_comes_at_once_and_the_old_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        press()
    assert signal.getsignal(signal.SIGINT) is before


def test_what_fails_behind_a_ctrl_c_was_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    """As in a lazy import, which makes an error of its own of whatever is raised there."""

    @reported
    def command(*, presses: bool) -> None:
        try:
            if presses:
                press()
        except KeyboardInterrupt as error:
            raise SpecgenError("cannot read the weights") from error
        raise SpecgenError("cannot read the prompts")

    before = signal.getsignal(signal.SIGINT)
    for presses, code, said in ((True, INTERRUPTED, ""), (False, 2, "error: cannot read the prompts\n")):
        with pytest.raises(typer.Exit) as ended:
            command(presses=presses)
        assert ended.value.exit_code == code
        assert capsys.readouterr().err == said
    assert signal.getsignal(signal.SIGINT) is before


def test_one_that_a_library_swallows_is_raised_at_the_next_check(capsys: pytest.CaptureFixture[str]) -> None:
    class Dying:
        def __del__(self) -> None:
            press()

    with interrupt_watch():
        interrupt_watch.check()
        dying = Dying()
        del dying
        with pytest.raises(KeyboardInterrupt):
            interrupt_watch.check()
    assert capsys.readouterr().err == ""
