"""A method described for people: what it is, where it comes from, what can be set."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from specgen.methods import FEEDS, POLICIES, Method, known_settings


def method_card(console: Console, method: Method) -> None:
    """Name, paper and whether it is lossless; a line a setting, with its default."""
    head = Text().append(method.name, "strong").append(f"  {method.paper}", "quiet")
    head.append("  lossless" if method.lossless else "  lossy", "good" if method.lossless else "bad")
    if method.needs_draft_model:
        head.append("  needs a draft model", "quiet")
    console.print(head)
    if method.any_policy:
        fitting = [name for name, policy in POLICIES.items() if policy.needs <= FEEDS[method.drafter]]
        console.print(
            Text(f"  policy={method.policy or ''}").append(f"  one of {', '.join(fitting)}, with its settings", "quiet")
        )
    for name, setting in known_settings(method, method.policy).items():
        default = str(setting.default).lower() if isinstance(setting.default, bool) else setting.default
        console.print(Text(f"  {name}={default}").append(f"  {setting.help}", "quiet"))
