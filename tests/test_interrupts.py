"""Ctrl-C waits while a round is shown and recorded, and only the first one does."""

from __future__ import annotations

import os
import signal

import pytest

from specgen.cli.interrupts import Interrupts


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
        interrupts._waiting = False


def test_between_rounds_it_comes_at_once_and_the_old_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        press()
    assert signal.getsignal(signal.SIGINT) is before
