"""A first Ctrl-C is deferred while a round is shown and recorded, and none is lost during a
command."""

from __future__ import annotations

import os
import signal

import pytest
import typer

from specgen.base.errors import SpecgenError
from specgen.base.interrupts import ReportedInterrupt, interrupts
from specgen.cli.app import INTERRUPTED, reported
from specgen.cli.options import GenerateOutput
from specgen.cli.output_writers import OutputWriter
from specgen.pair.pair import Pair


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_one_is_deferred_to_the_end_of_the_outermost_block_and_the_second_is_not() -> (
    None
):
    before = signal.getsignal(signal.SIGINT)
    done = []
    with interrupts.caught():
        with pytest.raises(KeyboardInterrupt), interrupts.held():  # noqa: PT012  the inner block is the statement
            with interrupts.held() as pending:
                assert not pending()
                press()
                assert pending()
            done.append("shown")
        with interrupts.held():
            done.append("held again")
    with interrupts.held(raises=False):
        press()
        with pytest.raises(KeyboardInterrupt):
            press()
    with interrupts.held(raises=False) as pending:
        assert not pending()
    with interrupts.caught(), pytest.raises(KeyboardInterrupt):
        press()
    assert done == ["shown", "held again"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_of_the_caller_stays() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with interrupts.watched(), interrupts.held():
            press()
            assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_after_a_ctrl_c_is_reported_as_an_interruption(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Some lazy imports replace a KeyboardInterrupt with an error of their own. Not where the
    command has caught it."""

    @reported
    def command(*, presses: bool, catches: bool = False) -> None:
        try:
            if presses and catches:
                with interrupts.caught():
                    press()
            elif presses:
                press()
        except KeyboardInterrupt as error:
            raise SpecgenError("cannot read the weights") from error
        raise SpecgenError("cannot read the prompts")

    for options, code, message in (
        ({"presses": True}, INTERRUPTED, "interrupted\n"),
        ({"presses": True, "catches": True}, 2, "error: cannot read the weights\n"),
        ({"presses": False}, 2, "error: cannot read the prompts\n"),
    ):
        with pytest.raises(typer.Exit) as ended:
            command(**options)
        assert (ended.value.exit_code, capsys.readouterr().err) == (code, message)


def test_one_that_a_library_suppresses_is_raised_at_the_next_check(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Dying:
        def __del__(self) -> None:
            press()

    with interrupts.watched():
        interrupts.check()
        dying = Dying()
        del dying
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert capsys.readouterr().err == ""


class InterruptedAtItsEnd:
    """Ctrl-C comes in its destructor, where Python drops the KeyboardInterrupt."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_python_loses_ends_the_answer(
    demo_pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    request = demo_pair.request("def f(", "ar", max_new_tokens=50)
    run = demo_pair.prepare(request)
    writer = OutputWriter(demo_pair, request, run, GenerateOutput(quiet=True), "", None)
    with interrupts.caught():
        lost = InterruptedAtItsEnd()
        del lost
        with pytest.raises(ReportedInterrupt):
            writer.write()
    assert len(capsys.readouterr().out) < 20
