"""The chart of how well a length policy predicts acceptance: the share of accepted tokens by predicted probability."""

from __future__ import annotations

from typing import Any

from specgen.traces.calibration import Calibration, CalibrationBin
from specgen.view.html.charts import Axes, polyline
from specgen.view.recorded_methods import calibration_text

_TOP, _BOTTOM, _HEIGHT = 8.0, 216.0, 240.0  # pixels: acceptance 1, acceptance 0, the whole chart


def calibration_chart(calibration: Calibration | None) -> dict[str, Any] | None:
    """Returns the values of the macro `calibration_chart`; None where no predictions were recorded.

    It has a point for each interval of the predicted probability, with the 95 % interval of the share of accepted tokens. Exact
    predictions lie on the diagonal.
    """
    if calibration is None:
        return None
    below = [(share / 4, f"{share / 4:.0%}", "start" if not share else "end" if share == 4 else "middle") for share in range(5)]
    return {
        "axes": Axes(
            _HEIGHT, [_y(share / 4) for share in range(5)], [(_y(share), f"{share:.0%}") for share in (0, 0.5, 1)], below
        ),
        "exact": polyline([(0.0, _y(0)), (1.0, _y(1))], _HEIGHT),
        "bins": [_point(found) for found in calibration.bins],
        "caption": calibration_text(calibration),
    }


def _point(found: CalibrationBin) -> dict[str, Any]:
    low, high = found.interval
    title = f"{found.accepted:,} of {found.verified:,} accepted, {found.rate:.0%}; predicted {found.predicted:.0%}"
    return {"x": found.predicted, "y": _y(found.rate), "low": _y(low), "high": _y(high), "title": title}


def _y(share: float) -> float:
    return _TOP + (1 - share) * (_BOTTOM - _TOP)
