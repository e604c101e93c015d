"""Describes decoding methods for `specgen inspect --methods`: the paper, whether it is lossless, and the settings."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.text import Text

from specgen.methods import available_policies, known_settings
from specgen.methods.method import Method


def method_line(method: Method) -> dict[str, Any]:
    """Returns the JSON line of a decoding method. A setting's `low` or `high` is None where its values have no such bound."""
    settings = {
        name: {
            "default": setting.default,
            "help": setting.help,
            "low": setting.low if math.isfinite(setting.low) else None,
            "high": setting.high if math.isfinite(setting.high) else None,
            "choices": list(setting.choices),
        }
        for name, setting in known_settings(method, method.policy).items()
    }
    return {
        "type": "method",
        "name": method.name,
        "paper": method.paper,
        "lossless": method.lossless,
        "needs_draft_model": method.needs_draft_model,
        "needs_exit_layer": method.needs_exit_layer,
        "policy": method.policy,
        "policies": available_policies(method) if method.any_policy else [],
        "settings": settings,
    }


def method_card(console: Console, method: Method) -> None:
    """Prints a decoding method's name, its paper and whether it is lossless, then a line per setting with its default value."""
    head = Text().append(method.name, "strong").append(f"  {method.paper}", "quiet")
    head.append("  lossless" if method.lossless else "  lossy", "good" if method.lossless else "bad")
    if method.needs_draft_model:
        head.append("  needs a draft model", "quiet")
    if method.needs_exit_layer:
        head.append("  needs an exit layer", "quiet")
    if method.head:
        head.append("  needs a trained head", "quiet")
    console.print(head)
    if method.any_policy:
        policies = ", ".join(available_policies(method))
        fixed = "; k=N alone: policy=fixed" if method.k_alone else ""
        console.print(Text(f"  policy={method.policy or ''}").append(f"  one of {policies}, with its settings{fixed}", "quiet"))
    for name, setting in known_settings(method, method.policy).items():
        default = str(setting.default).lower() if isinstance(setting.default, bool) else setting.default
        console.print(Text(f"  {name}={default}").append(f"  {setting.help}", "quiet"))
