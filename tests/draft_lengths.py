"""The setting of each method that limits a draft's length."""

from __future__ import annotations

LENGTH_SETTINGS = {
    "sd": "k",
    "adaptive": "max_draft",
    "heuristic": "k",
    "lookup": "k",
    "suffix": "max_draft",
    "lookahead": "window",
    "ouroboros": "k",
    "confidence": "max_draft",
    "svip": "max_draft",
    "beta-ts": "max_draft",
    "spectr": "k",
    "specinfer": "k",
    "pearl": "window",
    "eesd": "max_draft",
    "eesd-fixed": "k",
    "eesd-beta": "max_draft",
    "eesd-cali": "max_draft",
    "eesd-tree": "depth",
    "selfsd": "k",
}
