"""The page at `/`: a conversation with the model. It is one file, loads nothing from elsewhere, and
asks this server as any other client does."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

_FILE = Path(__file__).with_name("chat.html")


@dataclass(frozen=True, slots=True)
class ChatPage:
    """The page with the headers that it has to have: only its own style and script may be used,
    and it may ask this server alone."""

    html: str
    headers: dict[str, str]


def chat_page() -> ChatPage:
    html = _FILE.read_text(encoding="utf-8")
    policy = [
        "default-src 'none'",
        f"style-src {_hash_of('style', html)}",
        f"script-src {_hash_of('script', html)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    headers = {
        "Content-Security-Policy": "; ".join(policy),
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return ChatPage(html, headers)


def _hash_of(element: str, html: str) -> str:
    """Returns the source in a policy that allows the content of the page's only such element."""
    (content,) = re.findall(f"<{element}>(.*?)</{element}>", html, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
