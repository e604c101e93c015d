"""Reads the lines of a conversation from the terminal."""

from __future__ import annotations

import os
from collections.abc import Callable


def line_reader() -> Callable[[str], str]:
    """Returns a function that shows a prompt and returns what the user types or pastes until Enter.

    A pasted text may have several lines, and Alt-Enter begins a new line. Earlier messages come
    back with the arrow keys. The function raises KeyboardInterrupt for Ctrl-C, also right after
    Enter, and EOFError for Ctrl-D in an empty line. To a terminal that obeys no cursor movements
    (`TERM=dumb`) it sends none, and gives the user only what `input` does.
    """
    if os.environ.get("TERM") in ("dumb", "unknown"):
        return input
    # A terminal that leaves the question where the cursor is unanswered would get a warning.
    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
    from prompt_toolkit import PromptSession
    from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.keys import Keys

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(key_bindings=keys, reserve_space_for_menu=0)

    def read(prompt: str) -> str:
        text = session.prompt(prompt)
        keyboard = session.app.input
        later = get_typeahead(keyboard)
        with keyboard.raw_mode():  # without it, keys that are no complete line stay unread
            later += keyboard.read_keys()
        if any(key.key == Keys.ControlC for key in later):
            raise KeyboardInterrupt  # typed right after Enter: no answer is wanted
        store_typeahead(keyboard, later)
        return text

    return read
