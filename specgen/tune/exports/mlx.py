"""Exports to mlx-lm and mlx-vlm: commands."""

from __future__ import annotations

from shlex import quote

from specgen.tune.exports.records import ExportedMethod, ExportedModels

# the target's types whose MTP layers mlx-vlm takes out of the target's files
WITH_MTP = ("glm4_moe_lite", "hy_v4", "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_next")
_KINDS = {"mtp": "mtp", "assistant": "mtp", "eagle3": "eagle3"}


def write(method: ExportedMethod) -> str:
    draft = quote(str(method.draft))
    command = write_plain(method.models)
    return f"{command} --draft-model {draft} --num-draft-tokens {method.length}"


def write_plain(models: ExportedModels) -> str:
    return f"mlx_lm.generate --model {quote(models.target)}"


def refuses(method: ExportedMethod) -> str | None:
    if method.models.mixers:
        return "mlx runs no drafts for targets with recurrent or convolutional layers"
    return None


def write_vlm(method: ExportedMethod) -> str:
    """Returns the command for mlx-vlm, whose blocks count the last verified token, too."""
    assert method.head is not None
    kind = _KINDS.get(method.drafter, "dflash")
    return (
        f"{write_plain_vlm(method.models)} --draft-model {quote(method.head.folder)} "
        f"--draft-kind {kind} --draft-block-size {method.length + 1}"
    )


def write_plain_vlm(models: ExportedModels) -> str:
    return f"mlx_vlm.generate --model {quote(models.target)}"


def refuses_vlm(method: ExportedMethod) -> str | None:
    target_type = method.models.target_type.removesuffix("_text")
    if method.drafter == "mtp" and target_type not in WITH_MTP:
        return f"mlx-vlm does not run the MTP layers of {target_type} models"
    return None
