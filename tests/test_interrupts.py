"""A first Ctrl-C is deferred while a round is shown and recorded, and none is lost during a command."""

from __future__ import annotations

import os
import signal

import pytest
import typer

from specgen.base.errors import SpecgenError
from specgen.cli.error_reporting import INTERRUPTED, reported
from specgen.cli.interrupts import Interrupts, interrupt_watch


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_one_is_deferred_to_the_end_of_the_round() -> None:
    done = []
    with Interrupts() as interrupts:
        held = interrupts.held()
        held.__enter__()
        press()
        done.append("shown")
        with pytest.raises(KeyboardInterrupt):
            held.__exit__(None, None, None)
    assert done == ["shown"]


def test_the_second_one_is_not_deferred() -> None:
    with Interrupts() as interrupts, interrupts.held():
        press()
        with pytest.raises(KeyboardInterrupt):
            press()
        interrupts._pending = False


def test_between_rounds_it_is_raised_at_once_and_the_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        press()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_after_a_ctrl_c_is_reported_as_an_interruption(capsys: pytest.CaptureFixture[str]) -> None:
    """Some lazy imports replace a KeyboardInterrupt with an error of their own."""

    @reported
    def command(*, presses: bool) -> None:
        try:
            if presses:
                press()
        except KeyboardInterrupt as error:
            raise SpecgenError("cannot read the weights") from error
        raise SpecgenError("cannot read the prompts")

    before = signal.getsignal(signal.SIGINT)
    for presses, code, message in ((True, INTERRUPTED, ""), (False, 2, "error: cannot read the prompts\n")):
        with pytest.raises(typer.Exit) as ended:
            command(presses=presses)
        assert ended.value.exit_code == code
        assert capsys.readouterr().err == message
    assert signal.getsignal(signal.SIGINT) is before


def test_one_that_a_library_suppresses_is_raised_at_the_next_check(capsys: pytest.CaptureFixture[str]) -> None:
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
