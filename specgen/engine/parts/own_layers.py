"""The target drafts for itself: with its first layers and a trained exit (EESD, section 3.1), or
without some layers (Self-SD).

An exit consists of native layers; the target may be run by either backend. Target and draft are two
runners on the same model. Both start from the hidden states after layer N, which a third runner
computes once per token and keeps. So verifying a draft runs only the layers after the first N. A
predictor of acceptance for Cali-TS (Eq. 5) may have been trained with the exit.

An exit of the present format also reads the target's last hidden state of the token before, which
is known for all tokens of the context: a linear map joins both. For a drafted token, the exit's own
last state of the token before stands in for it.

Layer skipping (Zhang et al. 2023) uses the target's KV cache: it reads the keys and values of the
committed tokens, and writes those of drafted tokens after them. The latter are reused while the
draft grows, and dropped when the target itself runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specgen.base.errors import SpecgenError
from specgen.base.skipped_layers import SkippedLayers
from specgen.base.types import Context
from specgen.engine.devices import inference, upload
from specgen.engine.forward_pass import (
    NO_NODES,
    BatchPass,
    ForwardFunction,
    ForwardPass,
    HiddenSource,
    LayerCall,
    ModelOutput,
    passes_of_levels,
    tokens_before,
)
from specgen.engine.kernels.branches import Join, PassProgram, Program, SegmentInputs, Table
from specgen.engine.kernels.operators import Kernels, kernels_for
from specgen.engine.model import Model, ModelShape
from specgen.engine.model_runner import ModelRunner, Runners
from specgen.engine.native.architecture import Architecture
from specgen.engine.native.inputs import InputMaker, PassInputs, layer_kinds
from specgen.engine.native.kv_buffer import KVBuffer
from specgen.engine.native.layer import NativeLayer
from specgen.engine.native.layer_files import EXIT_HEAD, FINAL_NORM, final_norm, layer_files
from specgen.engine.native.layer_stack import SHORT_PASS, LayerStack
from specgen.engine.native.linear import Linear, MakeLinear, kernel_runs
from specgen.engine.native.native_model import NativeForward, NativeModel, final_logits
from specgen.engine.native.norms import norm_function, norm_gain, output_norm
from specgen.engine.native.tensors import tensor_shapes
from specgen.engine.parts.part import (
    FeatureRunner,
    KeptRows,
    native_layers,
    of_all_tokens,
    part_linears,
    part_weight,
)
from specgen.engine.penalties import PenaltyProcessor

# names in an exit layer's file
JOIN = "join.weight"
JOIN_BIAS = "join.bias"
VOCABULARY = "vocabulary"
MAX_LAYERS = 2  # EESD's Figure 5 shows that more than one layer gains little


def check_exit(model: Model, after: int, layers: int, name: str = "the exit") -> None:
    """Raises SpecgenError unless the model can have an exit with `layers` decoder layers after its
    first `after` layers.

    The model needs a layer before the exit and one after it. `name` is what the message calls the
    exit.
    """
    if not 0 <= layers <= MAX_LAYERS:
        raise SpecgenError(
            f"{name} has {layers} layers", f"It can have 0 (a head alone) to {MAX_LAYERS}"
        )
    count = model.shape.num_layers
    if not 1 <= after < count:
        raise SpecgenError(
            f"{name} is after layer {after} of {count}", f"It can be after layer 1 to {count - 1}"
        )


def default_exit_depth(layers: int) -> int:
    """Returns N, the number of layers before EESD's exit: 1 + layers // 20.

    This gives both numbers of the paper (section 4.1), 5 of 80 layers and 3 of 40. From 10 layers
    on, it is always 5 to 10 % of them, as the paper suggests (section 5.4).
    """
    return 1 + layers // 20


def known_architecture(shape: ModelShape, feature: str, *, any_sizes: bool = False) -> Architecture:
    """Returns `shape`, which is the target's, as an architecture.

    Raises SpecgenError, which names `feature`, if the native decoder does not know the model's
    family, or if its layers have several sizes and `any_sizes` is False.
    """
    needed = "of a family that specgen knows"
    if isinstance(shape, Architecture):
        if any_sizes or shape.is_uniform:
            return shape
        needed = "whose layers have one size"
    raise SpecgenError(f"{feature} needs a target {needed}, not {shape.model_type}", "Take -m svip")


def exit_architecture(model: Model) -> Architecture:
    """Returns the target's architecture, which its exit layer shares.

    Raises SpecgenError if the native decoder does not know the model's family, or if its layers
    cannot be trained.
    """
    architecture = known_architecture(model.shape, "early exit")
    if (parts := architecture.fixed_parts) is not None:
        raise SpecgenError(
            f"early exit needs a target without {parts}, as these cannot be trained",
            "Take -m lookup or svip",
        )
    return architecture


class ExitLayers:
    """An exit: decoder layers, a norm and an LM head, which run on the hidden states after the
    first layers of the target `model`.

    `count` is the number of decoder layers. `tensors` has the weights by their names in an exit
    layer's file; without an LM head among them, the target's is used. With JOIN and JOIN_BIAS among
    them, the exit `is_joined`: a linear map of two normed states enters the decoder layers (see
    `joined`). VOCABULARY has the target's id of each token that the LM head knows, ascending;
    without it, the head knows all. `make_linear` None makes an exit for drafting; in training it
    makes differentiable layers from parameters, and `make_layer` is the class of decoder layers.
    Raises SpecgenError as `exit_architecture` does.
    """

    def __init__(
        self,
        model: Model,
        count: int,
        tensors: Mapping[str, Tensor],
        make_linear: MakeLinear | None = None,
        make_layer: type[NativeLayer] = NativeLayer,
    ) -> None:
        self._architecture = architecture = exit_architecture(model)
        self._model = model
        self.dtype = model.dtype
        dtype = torch.float32
        gain = 1.0
        if make_linear is None:
            dtype, gain = model.dtype, norm_gain(architecture, model.dtype, model.device)
            make_linear = part_linears(model)
        devices = [model.device] * len(architecture.layers)
        self._inputs = InputMaker(architecture, model.dtype, devices)

        def take(name: str) -> Tensor:
            return tensors[name].to(model.device)

        _, kinds = layer_kinds(architecture, devices)
        with torch.autocast(model.device.type, enabled=False):  # products of weights with norms
            norm = final_norm(architecture, take, dtype, gain)
            self._norm = output_norm(architecture.norm_eps, gain, norm)
            self._norm_weight = norm
            self._head: Linear | None = None
            if EXIT_HEAD in tensors:
                self._head = make_linear(
                    part_weight(take(EXIT_HEAD), dtype, make_linear), None, 1.0
                )
            layers = native_layers(
                architecture,
                kinds[len(devices) - count :],
                take,
                dtype,
                make_linear,
                gain,
                make_layer=make_layer,
            )
            self._join = None
            if JOIN in tensors:
                join = take(JOIN) if gain == 1.0 else take(JOIN).float() * gain
                bias = take(JOIN_BIAS).to(dtype)
                self._join = make_linear(part_weight(join, dtype, make_linear), bias, 1.0)
        self._unit_norm = norm_function(architecture.norm_eps, gain)
        self._layers = LayerStack(layers)
        self._vocabulary = take(VOCABULARY) if VOCABULARY in tensors else None

    @property
    def is_joined(self) -> bool:
        return self._join is not None

    def reads_inputs_of(self, maker: InputMaker) -> bool:
        """Whether the layers that this maker makes inputs for read those of the exit."""
        return maker.kinds == self._inputs.kinds

    def new_cache(self) -> KVBuffer:
        """Returns an empty KV cache for the exit's decoder layers."""
        made = self._architecture
        devices = [self._model.device] * max(len(self._layers), 1)
        return KVBuffer(
            devices, [(made.num_kv_heads, made.head_size)] * len(devices), self._model.dtype
        )

    def forward(self, source: HiddenSource) -> ForwardFunction:
        """Returns a function that runs the exit on a forward pass. `source` returns the hidden
        states [n, width] that enter the exit."""

        def run(forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
            return self.run(forward_pass, source(forward_pass).clone(), logits_to_keep)

        return run

    def program(self, before: Program, table: Table) -> PassProgram | None:
        """Returns the program of passes through the target's first layers, `before`, and the exit;
        None if the kernels cannot run all of the exit."""
        model = self._model
        pieces = self._layers.short_pieces
        layers = pieces[0].program if len(pieces) == 1 else None if pieces else Program([])
        target_head = model.outer.head if isinstance(model, NativeModel) else None
        head = self._head or target_head
        heads = None if head is None else kernel_runs(head)
        maps = [] if self._join is None else kernel_runs(self._join)
        if layers is None or heads is None or maps is None:
            return None
        eps = self._architecture.norm_eps
        join = Join(maps[0], eps) if maps else None
        return PassProgram(
            [(before, None), (layers, join)],
            self._architecture.hidden_size,
            SHORT_PASS,
            table=table,
            norm=self._norm_weight,
            eps=eps,
            head=heads[0],
        )

    def inputs(self, forward_pass: ForwardPass) -> PassInputs:
        """Returns the inputs of a pass through the decoder layers."""
        return self._inputs(forward_pass)

    def output(self, states: Tensor, logits: Tensor | None, kept: int) -> ModelOutput:
        """Returns the output of a short pass for its last `kept` rows: `logits` [kept, tokens that
        the head knows] are the products of the LM head, whose inputs are rows of `states`."""
        assert logits is not None
        if kept != len(states):
            states = states[-kept:]
        logits = final_logits(self._architecture, logits)
        return ModelOutput(
            of_all_tokens(logits, self._vocabulary, self._model.shape.vocab_size), states
        )

    def run(self, forward_pass: ForwardPass, hidden: Tensor, logits_to_keep: int) -> ModelOutput:
        """Runs decoder layers, norm and head on the hidden states [n, width] that enter them, which
        are changed."""
        inputs = self._inputs(forward_pass)
        hidden = self._layers(hidden, inputs)
        logits, states = self.norm_and_head(hidden[-logits_to_keep:])
        return ModelOutput(
            of_all_tokens(logits, self._vocabulary, self._model.shape.vocab_size), states
        )

    def joined(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Returns the states [n, width] that enter the decoder layers: a linear map of the normed
        states `hidden`, those after the target's first layers, and `before`, the last states, after
        the norm, of the tokens before."""
        assert self._join is not None
        return self._join(self._unit_norm(torch.stack((hidden, before), dim=1)).flatten(1))

    def run_layers(self, states: Tensor, batch: BatchPass) -> Tensor:
        """Runs the decoder layers on the hidden states [batch * n, width] that enter them. Returns
        those after them. Differentiable."""
        inputs = self._inputs.batched(batch)
        return self._layers(states, inputs)

    def last_states(self, hidden: Tensor) -> Tensor:
        """Returns the LM head's input [..., width] for the hidden states after the layers."""
        return self._norm(hidden)

    def norm_and_head(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the norm and the LM head on the hidden states [..., width] after the decoder layers.

        Returns the logits [..., tokens that the head knows], and the head's input [..., width].
        """
        states = self.last_states(hidden)
        return self.head_logits(states), states

    def head_logits(self, states: Tensor) -> Tensor:
        """Returns the logits [..., tokens of the LM head] for the head's input [..., width]."""
        if self._head is None:
            return self._model.head_logits(states)
        return final_logits(self._architecture, self._head(states))


class ShortPass:
    """Runs short passes through the target's first layers and what follows them, the exit or the
    target's later layers, in one call of the kernels.

    `program` is that of both. The first layers are those of the runner `first`: its cache and its
    features are read and written, and tokens that are there do not run them again. `inputs` makes
    the inputs of a pass, and `output` its output, from the states after the layers, the logits and
    the number of rows to keep.
    """

    def __init__(
        self,
        program: PassProgram,
        kernels: Kernels,
        first: FeatureRunner,
        inputs: Callable[[ForwardPass], PassInputs],
        output: Callable[[Tensor, Tensor | None, int], ModelOutput],
    ) -> None:
        self._program = program
        self._kernels = kernels
        self._first = first
        self._inputs = inputs
        self._output = output

    def __call__(
        self, forward_pass: ForwardPass, kept: int, before: Tensor | None = None
    ) -> ModelOutput | None:
        """Runs a pass over n tokens and returns the output for the last `kept` of them; None, and
        runs nothing, if the pass is long or if `first` lacks tokens before it. `before` [n, width]
        are the last states of the tokens before, for an exit that `is_joined`."""
        if forward_pass.last - forward_pass.first > SHORT_PASS:
            return None
        resumed = self._first.resume(forward_pass)
        if resumed is None:
            return None
        features, known = resumed
        place = self._inputs(forward_pass).place
        assert place is not None
        shared = self._first.cache
        assert isinstance(shared, KVBuffer)
        own = place.cache
        program = self._program
        segments = (
            SegmentInputs(place.kinds, shared.places(), shared.first_layer),
            SegmentInputs(
                place.kinds,
                own.places(),
                own.first_layer,
                (features, program.width),
                None if before is None else before.data_ptr(),
            ),
        )
        self._kernels.use_threads(torch.get_num_threads())
        states, logits = self._kernels.run_pass(
            program, forward_pass.ids, segments, place.slot, kept, (features, known)
        )
        self._first.ran(forward_pass)
        return self._output(states, logits, kept)

    @classmethod
    def of_exit(
        cls, layers: ExitLayers, earlier: ForwardFunction, first: FeatureRunner
    ) -> ShortPass | None:
        """Returns what runs the exit together with `earlier`, the target's first layers; None if
        the kernels cannot."""
        parts = _for_kernels(earlier)
        if parts is None:
            return None
        model, before, table, kernels = parts
        program = layers.program(before, table)
        if program is None or not layers.reads_inputs_of(model.inputs):
            return None
        return cls(program, kernels, first, layers.inputs, layers.output)

    @classmethod
    def of_target(
        cls, later: ForwardFunction, earlier: ForwardFunction, first: FeatureRunner
    ) -> ShortPass | None:
        """Returns what runs the target's layers `later` together with its first ones, `earlier`;
        None if the kernels cannot."""
        parts = _for_kernels(earlier)
        if parts is None or not isinstance(later, NativeForward):
            return None
        model, before, table, kernels = parts
        program = later.program_after(before, table)
        if program is None:
            return None

        def output(states: Tensor, logits: Tensor | None, kept: int) -> ModelOutput:
            return later.output(states, logits, kept, states if later.taps else None)

        return cls(program, kernels, first, model.inputs, output)

    def or_else(self, forward: ForwardFunction) -> ForwardFunction:
        """Returns a function that runs the passes that this cannot by `forward`."""

        def run(forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
            output = self(forward_pass, logits_to_keep)
            return forward(forward_pass, logits_to_keep) if output is None else output

        return run


def _for_kernels(
    earlier: ForwardFunction,
) -> tuple[NativeModel, Program, Table, Kernels] | None:
    """Returns the model of these first layers, their program, its embeddings and the kernels; None
    if the kernels cannot run all of them."""
    if not isinstance(earlier, NativeForward) or earlier.program is None:
        return None
    model = earlier.model
    table = model.embedding_table()
    if table is None or model.kernels is None:
        return None
    return model, earlier.program, table, model.kernels


class ExitRunner(ModelRunner):
    """Drafts with an exit that `is_joined`. `source` returns the hidden states after the target's
    first layers; `target` keeps the target's last states; `short` runs what passes it can.

    The cache has the keys and values of the context's tokens, made from the target's last states,
    then those of the draft, made from the exit's own; a level of a draft takes a pass. When the
    context grows, the draft's are dropped, those of accepted tokens too: these are run again with
    the target's states, in the pass that also computes the next draft's first logits.
    """

    def __init__(
        self,
        model: Model,
        penalties: PenaltyProcessor | None,
        layers: ExitLayers,
        source: HiddenSource,
        target: FeatureRunner,
        short: ShortPass | None = None,
    ) -> None:
        super().__init__(model, penalties, self._run, layers.new_cache())
        self._layers = layers
        self._short = short
        self._source = source
        self._target = target
        self._width = model.shape.hidden_size
        self._states = KeptRows()  # the exit's own last states

    @inference
    def logits(
        self,
        context: Context,
        draft: Sequence[int] = (),
        parents: Sequence[int] | None = None,
        *,
        start: int = 0,
    ) -> ModelOutput:
        """Returns the logits after the context (index 0) and after each draft token i (index i +
        1), from index `start` on. The arguments are those of `ModelRunner.logits`."""
        if self._cached.committed != len(context):
            self._cached.truncate(self._cached.committed)  # drops the draft
        return super().logits(context, draft, parents, start=start)

    def _run(self, forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
        length = len(forward_pass.context)
        outputs: list[ModelOutput] = []
        if forward_pass.first < length:
            last = min(forward_pass.last, length)
            committed = forward_pass._replace(draft=NO_NODES, last=last)
            outputs.append(self._run_one(committed, self._targets_states(committed), 1))
        for level, _ in passes_of_levels(forward_pass):
            if level.is_chain:
                states = self._states.kept[level.first - 1 : level.last - 1]
            else:
                before = upload(tokens_before(level), self.device)
                states = self._states.kept.index_select(0, before)
            outputs.append(self._run_one(level, states, level.last - level.first))
        if len(outputs) == 1 and outputs[0].logits.shape[0] == logits_to_keep:
            return outputs[0]
        logits, hidden = (torch.cat(rows) for rows in list(zip(*outputs, strict=True))[:2])
        return ModelOutput(logits[-logits_to_keep:], hidden[-logits_to_keep:])

    def _run_one(self, forward_pass: ForwardPass, before: Tensor, kept: int) -> ModelOutput:
        """Runs the exit on the n tokens of a pass, with the last states `before` [n, width] of the
        tokens before them. Returns the output for the last `kept` of them."""
        self.cache.length = forward_pass.first
        output = None if self._short is None else self._short(forward_pass, kept, before)
        if output is None:
            joined = self._layers.joined(self._source(forward_pass), before)
            output = self._layers.run(forward_pass, joined, kept)
        assert output.hidden_states is not None
        self._states.write(forward_pass.last - kept, output.hidden_states, self.cache.capacity)
        return output

    def _targets_states(self, forward_pass: ForwardPass) -> Tensor:
        """Returns the target's last states [n, width] of the tokens before the n of a pass; zeros
        before the first token."""
        first = max(forward_pass.first - 1, 0)
        last = forward_pass.last - 1
        parts: list[Tensor] = []
        if forward_pass.first == 0:
            dtype = self._layers.dtype
            parts.append(torch.zeros(1, self._width, dtype=dtype, device=self.device))
        if last > first:
            parts.append(self._target.features(forward_pass._replace(first=first, last=last)))
        return torch.cat(parts)


def exit_shapes(
    model: Model,
    count: int,
    *,
    own_head: bool,
    is_joined: bool = False,
    vocabulary: int | None = None,
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the weights of an exit with `count` decoder layers, and with `own_head`
    an LM head, by their names in its file. Raises SpecgenError as `exit_architecture` does.

    The head knows `vocabulary` tokens (None: all of the target's). `is_joined`: see `ExitLayers`.
    """
    architecture = exit_architecture(model)
    width = architecture.hidden_size
    shapes: dict[str, tuple[int, ...]] = {FINAL_NORM: (width,)}
    shapes |= {EXIT_HEAD: (vocabulary or model.shape.vocab_size, width)} if own_head else {}
    shapes |= {JOIN: (width, 2 * width), JOIN_BIAS: (width,)} if is_joined else {}
    shapes |= {} if vocabulary is None else {VOCABULARY: (vocabulary,)}
    for index in range(count):
        shapes |= tensor_shapes(layer_files(architecture, index))
    return shapes


class Predictor(torch.nn.Module):
    """Predicts the probability theta_M = sigmoid(w . [W_i h_T, h_D] + b_i) that the i-th token of a
    draft (i from 1) is accepted.

    h_T is the target's hidden state (after the norm) from which the last committed token was
    predicted. h_D is the exit layer's hidden state from which the drafted token was predicted. b_i
    is a bias. W_i occurs only in its product with the first half of w, so this product, a vector,
    is trained instead, one per position i. All positions from the tenth on share the same
    parameters.
    """

    POSITIONS = 10

    def __init__(self, width: int) -> None:
        super().__init__()
        self.target_weights = torch.nn.Parameter(torch.zeros(self.POSITIONS, width))
        self.draft_weights = torch.nn.Parameter(torch.zeros(width))
        self.bias = torch.nn.Parameter(torch.zeros(self.POSITIONS))

    def offsets(self, target_hidden: Tensor) -> Tensor:
        """Returns the part of the sigmoid's argument that depends on the target's hidden state
        [..., width].

        The result [..., POSITIONS] has one number per position of a drafted token.
        """
        return torch.nn.functional.linear(
            target_hidden.to(self.bias.dtype), self.target_weights, self.bias
        )

    def logits(self, offsets: Tensor, draft_hidden: Tensor, positions: Tensor) -> Tensor:
        """Returns the sigmoid's argument [..., n] for n drafted tokens, for training.

        `offsets` [..., POSITIONS] is from `offsets`, `draft_hidden` [..., n, width] are the exit
        layer's hidden states, and `positions` [..., n] are the tokens' positions in the draft, from
        1.
        """
        index = positions.clamp(1, self.POSITIONS) - 1
        return draft_hidden.to(self.bias.dtype) @ self.draft_weights + offsets.gather(-1, index)


class _HoldsStates(Protocol):
    """A runner that keeps the hidden states of its last pass."""

    @property
    def device(self) -> torch.device: ...

    def last_hidden_state(self, context: Context) -> Tensor | None:
        """Returns the hidden state [width] from which the model predicted the context's last token;
        None if it is not kept."""


class ExitAcceptancePredictor:
    """Predicts the probability that a drafted token is accepted: theta_M of EESD, Eq. 5.

    The inputs are the target's hidden state before the draft and the exit layer's hidden state at
    the drafted token.
    """

    def __init__(self, target: _HoldsStates, predictor: Predictor) -> None:
        self.predictor = predictor
        self._target = target
        self._weights = predictor.draft_weights.detach()
        self._row = self._weights[None]
        self._target_weights = predictor.target_weights.detach()
        self._kernels = kernels_for(self._weights.device, self._weights.dtype)
        self._biases = predictor.bias.detach()
        self._offsets: Tensor | list[float] = [0.0] * predictor.POSITIONS

    def begin(self, context: Context) -> None:
        """Starts a draft after `context`: computes the part of the prediction that depends only on
        the target's hidden state."""
        hidden = self._target.last_hidden_state(context)
        # only outside of decoding: while decoding, the target has just predicted the context's last
        # token
        if hidden is None:
            hidden = torch.zeros_like(self._weights)
        if self._kernels is None:
            self._offsets = self.predictor.offsets(hidden)
            return
        products = self._kernels.dots(self._target_weights, hidden.to(self._weights.dtype))
        biases = self._biases.tolist()
        self._offsets = [one + bias for one, bias in zip(products, biases, strict=True)]

    def score(self, draft_hidden: Tensor, position: int) -> Tensor | float:
        """Returns the predicted acceptance probability of the token at `position` of the draft
        (from 1), as `AcceptancePredictor.score`.

        `draft_hidden` [width] is the exit layer's hidden state from which this token was predicted.
        `begin` has to be called before.
        """
        weights = self._weights
        offset = self._offsets[min(position, self.predictor.POSITIONS) - 1]
        hidden = draft_hidden if draft_hidden.dtype == weights.dtype else draft_hidden.float()
        if self._kernels is not None:
            (product,) = self._kernels.dots(self._row, hidden)
        elif weights.is_cpu:  # NumPy takes three fifths of the time of torch
            product = float(hidden.numpy() @ weights.numpy())
        else:
            return torch.sigmoid(hidden @ weights + offset)
        return 1 / (1 + math.exp(min(-product - float(offset), 700.0)))  # more would overflow


@dataclass(frozen=True)
class ExitWeights:
    """An exit layer after a target's first `after` layers, and a predictor of acceptance (None:
    none was trained)."""

    layers: ExitLayers
    after: int
    predictor: Predictor | None = None


def make_runners(
    weights: ExitWeights,
    model: Model,
    _: ModelRunner | None,
    penalties: Callable[[], PenaltyProcessor | None],
) -> Runners:
    """Returns the runners of early exit on one model.

    `first` runs the layers before the exit and keeps their output for both others: `draft`, which
    goes on with the exit layer, and `target`, which goes on with the later layers. `predictor` is
    None if none was trained. `penalties` is called once for `target` and once for `draft`, and
    makes the penalty processor. Raises SpecgenError for a model whose layers cannot be run one by
    one.
    """
    model.check_layers("early exit")
    earlier = range(weights.after)
    later = range(weights.after, model.shape.num_layers)
    run = model.forward([LayerCall(index) for index in earlier], with_head=False)
    first = FeatureRunner(
        model, lambda each, _: run(each, each.last - each.first), model.new_cache(earlier)
    )
    taps = [model.shape.num_layers] if weights.layers.is_joined else []
    verify = model.forward([LayerCall(index) for index in later], first.features, taps=taps)
    target: ModelRunner
    draft: ModelRunner
    short = ShortPass.of_exit(weights.layers, run, first)
    short_target = ShortPass.of_target(verify, run, first)
    if short_target is not None:
        verify = short_target.or_else(verify)
    if weights.layers.is_joined:
        target = FeatureRunner(model, verify, model.new_cache(later), penalties())
        draft = ExitRunner(model, penalties(), weights.layers, first.features, target, short)
    else:
        target = ModelRunner(model, penalties(), verify, model.new_cache(later))
        forward = weights.layers.forward(first.features)
        if short is not None:
            forward = short.or_else(forward)
        draft = ModelRunner(model, penalties(), forward, weights.layers.new_cache())
    predictor = (
        None if weights.predictor is None else ExitAcceptancePredictor(target, weights.predictor)
    )
    return Runners(target, draft, first, predictor)


class LayerSkippingRunner(ModelRunner):
    """Runs the target without the attention and without the MLPs of the layers that `skips` names,
    to draft.

    Shares the KV cache of `target`, the runner that verifies.

    `model` is the target's model. Raises SpecgenError if its layers cannot be run one by one.
    """

    def __init__(
        self,
        target: ModelRunner,
        model: Model,
        skips: SkippedLayers,
        penalties: PenaltyProcessor | None = None,
    ) -> None:
        model.check_layers("layer skipping")
        layers = range(model.shape.num_layers)
        calls = [
            LayerCall(index, index not in skips.attention, index not in skips.mlp)
            for index in layers
        ]
        forward = model.forward([call for call in calls if call.attention or call.mlp])
        super().__init__(model, penalties, forward, target.cache)
        self._target = target
        # the number returned by the target's `share_prefix` when this runner last used the shared
        # cache
        self._shared_at = -1

    @inference
    def logits(
        self,
        context: Context,
        draft: Sequence[int] = (),
        parents: Sequence[int] | None = None,
        *,
        start: int = 0,
    ) -> ModelOutput:
        """Returns the logits of the model without the skipped layers, after the context (index 0)
        and each draft token i (index i + 1).

        Only those from index `start` on are returned. The arguments are those of
        `ModelRunner.logits`.
        """
        committed, shared_at = self._target.share_prefix(context)
        if shared_at != self._shared_at:
            self._cached.set_committed(context, committed)
            self._shared_at = shared_at
        return super().logits(context, draft, parents, start=start)
