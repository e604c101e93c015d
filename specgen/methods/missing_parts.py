"""The errors for a method whose draft model or trained part is missing, and the commands that train it. Imports no torch."""

from __future__ import annotations

import shlex

from specgen.base.errors import SpecgenError
from specgen.methods.method import Method

WITHOUT_A_DRAFT = ", or use a method that needs none: -m lookup"


def no_draft_model(method: Method) -> SpecgenError:
    if method.drafts_without_model:
        message = f"{method.name} with lookup=false needs a draft model, and there is none"
        return SpecgenError(message, "Name one with --draft, or take lookup=true")
    return SpecgenError(f"{method.name} needs a draft model, and there is none", f"Name one with --draft{WITHOUT_A_DRAFT}")


def training_command(target: str | None) -> str:
    """Returns the command that trains an exit layer for the model `target`.

    None is the bundled target, whose training text is included.
    """
    of = "" if target is None else f" -t {shlex.quote(target)} --corpus FILE"
    return f"specgen tune --train --methods eesd{of}"


def no_exit_layer(method: Method, target: str | None) -> SpecgenError:
    return SpecgenError(
        f"{method.name} needs an exit layer trained for the target, and there is none",
        f"Train one with {training_command(target)}, or name one with --exit-layer FILE",
    )


def head_training_command(head: str, target: str | None) -> str:
    """Returns the command that trains a head of this kind for the model `target`; None is the bundled target."""
    of = "" if target is None else f" -t {shlex.quote(target)} --corpus FILE"
    return f"specgen tune --train --methods {head}{of}"


def no_head(method: Method, target: str | None) -> SpecgenError:
    return SpecgenError(
        f"{method.name} needs a head trained for the target, and there is none",
        f"Train one with {head_training_command(method.head, target)}, or name one with --head FOLDER",
    )


def no_predictor(method: Method) -> SpecgenError:
    return SpecgenError(
        f"{method.name} needs a predictor, and the exit layer has none",
        "Train another with specgen tune --train, set model_prediction=false, or use "
        + ("policy=beta-ts" if method.any_policy else "eesd-beta"),
    )
