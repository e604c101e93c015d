"""Older names of `eesd`, which are found but not listed: with other defaults. Imports no torch."""

from __future__ import annotations

from typing import ClassVar

from specgen.methods.eesd import EESD
from specgen.methods.model_drafts import tree_settings


class EESDCali(EESD):
    name = "eesd-cali"
    alias_of = "eesd"
    policy = "cali-ts"


class EESDBeta(EESDCali):
    name = "eesd-beta"
    policy = "beta-ts"


class EESDFixed(EESDCali):
    name = "eesd-fixed"
    policy = "fixed"


class EESDTree(EESD):
    name = "eesd-tree"
    alias_of = "eesd"
    policy = "cali-ts"
    policy_without_predictor = "beta-ts"
    settings: ClassVar = EESD.settings | tree_settings(3, 5)
    grows_trees = True
