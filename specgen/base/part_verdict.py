"""Whether a trained drafter pays: its measured speed against plain decoding and against the fastest
method that needs no training. Imports no torch.

This is the one place where it is decided. `specgen tune --train` measures and records the verdict
with what it trained; whoever chooses a method reads it there and leaves out what does not pay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from specgen.base.files import write_whole

PLAIN = "ar"
KEY = "verdict"  # in the figures of a description
# The held-out loss stands so far above the training loss, in nats a token, where the training texts
# are learned by heart and others would teach more.
TEXT_IS_SHORT = 0.3
RISING = 0.002  # agreement that was gained in the last tenth of the training and may go on rising


@dataclass(frozen=True, slots=True)
class PartVerdict:
    """How fast the trained drafter's `method` was, as a multiple of plain decoding's speed, and the
    same of the fastest other method (`best`; plain decoding itself if none was faster).

    `device` is the type of the target's device: the verdict holds there alone. `prompts` are the
    held-out prompts that were run, `tokens` the new tokens of each method.
    """

    method: str
    speedup: float
    best: str
    best_speedup: float
    device: str
    prompts: int = 0
    tokens: int = 0

    @classmethod
    def of(
        cls,
        speeds: Mapping[str, float],
        method: str,
        device: str,
        *,
        prompts: int = 0,
        tokens: int = 0,
    ) -> PartVerdict:
        """`speeds` are measured tokens per second by method, plain decoding and `method` among
        them."""
        others = {name: speed for name, speed in speeds.items() if name != method}
        best = max(others, key=lambda name: others[name])
        plain = speeds[PLAIN]
        return cls(
            method, speeds[method] / plain, best, others[best] / plain, device, prompts, tokens
        )

    @classmethod
    def read(cls, figures: Mapping[str, Any]) -> PartVerdict | None:
        """Returns the verdict among the figures of a description; None if there is none that can be
        read."""
        stored: Any = figures.get(KEY)
        try:
            return cls(**{name: value for name, value in stored.items() if name != "used"})
        except (AttributeError, TypeError):
            return None

    @property
    def pays(self) -> bool:
        """Whether it may be chosen: it was faster than all other methods."""
        return self.speedup > self.best_speedup

    def refusal(self, device: str) -> str | None:
        """Returns why the drafter is not chosen on a device of this type; None if it may be."""
        if self.pays or device != self.device:
            return None
        return f"trained here, but {self}"

    def record(self, description: Path) -> None:
        """Adds the verdict to the figures in the YAML file that describes what was trained. Raises
        OSError."""
        import yaml

        text = description.read_text(encoding="utf-8")
        comment = "".join(takewhile(lambda line: line.startswith("#"), text.splitlines(True)))
        content = yaml.safe_load(text)
        content["figures"][KEY] = {
            name: float(f"{value:.4g}") if isinstance(value, float) else value
            for name, value in self.as_dict().items()
        }
        shown = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        write_whole(description, comment + shown)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "used": self.pays}

    def __str__(self) -> str:
        best = "" if self.best == PLAIN else f", {self.best} {self.best_speedup:.2f} ×"
        return (
            f"{self.method} {self.speedup:.2f} × plain{best}: {'used' if self.pays else 'not used'}"
        )


@dataclass(frozen=True, slots=True)
class Learning:
    """How far a training went when it ended: the mean losses of its last steps and of held-out text
    (nats a token), the share of held-out tokens on which drafter and target agree, now and a tenth
    of the training earlier, and the tokens that were trained on since then."""

    loss: float
    held_out_loss: float
    agreement: float
    agreement_before: float
    tokens: int

    @property
    def needs_text(self) -> bool:
        """Whether text is what limits: training texts are predicted better than others by more than
        `TEXT_IS_SHORT`."""
        return self.held_out_loss - self.loss > TEXT_IS_SHORT

    def __str__(self) -> str:
        if not self.tokens:
            return "more time is what would help: it ended before its progress could be measured"
        gained = self.agreement - self.agreement_before
        if self.needs_text:
            helps = "more text is what would help"
        elif gained > RISING:
            helps = "more time is what would help"
        else:
            return "neither more text nor more time of this training would help much"
        points = 100 * gained / max(1, self.tokens) * 1000
        return f"{helps} (agreement rose {points:.2f} points in the last thousand tokens)"
