"""Turns terminal output into an SVG picture. It loads no fonts, and its colours follow the system's light or dark mode."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from specgen.view import theme

_GREY = [(0x59, 0x60, 0x69)] * 16
BACKGROUNDS = {
    "light": TerminalTheme((0xFF, 0xFF, 0xFF), (0x1F, 0x23, 0x28), _GREY),
    "dark": TerminalTheme((0x0D, 0x11, 0x17), (0xE6, 0xED, 0xF3), _GREY),
}
_FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px "DejaVu Sans Mono", Menlo, Consolas, monospace; }}
.{unique_id}-background {{ fill: [[background]]; }}
{styles}
[[dark]]
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{height}" /></clipPath>
{lines}</defs>
<rect class="{unique_id}-background" width="{width}" height="{height}" rx="8"/>
<g transform="translate(9, 22)" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">
{matrix}</g></g>
</svg>
"""


def svg(lines: Sequence[Text], width: int, unique_id: str = "specgen") -> str:
    """Returns styled lines as an SVG picture, `width` terminal cells wide. All its CSS class names begin with `unique_id`."""
    pictures = {}
    for flavour, background in BACKGROUNDS.items():
        console = recorder(width, flavour)
        for line in lines:
            console.print(line, soft_wrap=True)
        pictures[flavour] = console.export_svg(title="", theme=background, code_format=_FORMAT, unique_id=unique_id)
    light, dark = (background.background_color.hex for background in BACKGROUNDS.values())
    # Rich numbers the CSS classes of styles as they appear, so those of both flavours match
    rules = re.findall(rf"^\s*(\.{unique_id}-r\d+ {{.*}})$", pictures["dark"], flags=re.MULTILINE)
    rules.append(f".{unique_id}-background {{ fill: {dark}; }}")
    dark_rules = "@media (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}"
    return pictures["light"].replace("[[background]]", light).replace("[[dark]]", dark_rules)


def recorder(width: int, flavour: str) -> Console:
    """Returns a Rich console that records what is printed, so that its `export_svg` can draw it.

    `width` is in cells. `flavour` is the name of a colour scheme of `specgen.view.theme`.
    """
    return theme.ThemedConsole(
        record=True,
        width=width,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        theme=theme.theme(flavour),
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
        _environ={},
    )
