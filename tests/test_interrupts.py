"""Ctrl-C that Python loses."""

from __future__ import annotations

import signal

import pytest

from specgen.base.interrupts import ReportedInterrupt, interrupts
from specgen.cli.options import GenerateOutput
from specgen.cli.output_writers import OutputWriter
from specgen.pair.pair import Pair


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
