"""Early exit (EESD, section 3.1): one model drafts for itself, with its first N layers and a trained exit layer.

Target and draft are two model runners on the same model. Both start from the hidden states after layer N, which a third one
computes once per token and keeps. So verifying a draft runs only the layers after the first N.
"""

from __future__ import annotations

from collections.abc import Callable

from specgen.engine.forward_pass import LayerPart
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model import Model
from specgen.engine.model_runner import ModelRunner
from specgen.engine.parts.acceptance import ExitAcceptancePredictor
from specgen.engine.parts.exit_layers import check_exit_depth
from specgen.engine.parts.feature_runner import FeatureRunner, PartRunners
from specgen.engine.parts.weights import ExitWeights


def make_runners(
    weights: ExitWeights, model: Model, _: ModelRunner | None, penalties: Callable[[], PenaltyProcessor | None]
) -> PartRunners:
    """Returns two runners on one model: `draft` proposes with the exit layer, `target` verifies.

    `penalties` makes the processor for each of the two. Raises SpecgenError for a model whose layers cannot be run one by one,
    and for a depth that leaves no layers before or after the exit.
    """
    model.check_layers("early exit")
    check_exit_depth(model.shape.num_layers, weights.after)
    earlier, later = range(weights.after), range(weights.after, model.shape.num_layers)
    run = model.forward([LayerPart(index) for index in earlier], with_head=False)
    first = FeatureRunner(model, run, model.new_cache(earlier))
    verify = model.forward([LayerPart(index) for index in later], first.features_of)
    target = ModelRunner(model, penalties(), verify, model.new_cache(later))
    draft = ModelRunner(model, penalties(), weights.layers.forward(first.features_of), weights.layers.new_cache())
    predictor = None if weights.predictor is None else ExitAcceptancePredictor(target, weights.predictor)
    return PartRunners(target, draft, first, predictor)
