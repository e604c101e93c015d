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
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        with interrupts.held():
            press()
            done.append("shown")
        done.append("never")
    assert done == ["shown"]


def test_the_second_one_does_not_wait() -> None:
    done = []
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt), interrupts.held():
        press()
        press()
        done.append("never")
    assert not done


def test_between_rounds_it_comes_at_once_and_the_old_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        press()
    assert signal.getsignal(signal.SIGINT) is before
