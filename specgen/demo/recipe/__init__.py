r"""How the bundled models were trained: `python -m specgen.demo.recipe`. No other package of specgen may import this one.

The exit layer was trained with the command that its `exit.yaml` names. Its predictor was trained again, on text that is new to
the exit layer: the target's continuations of fresh prompts (only the questions of chat prompts occur in training):

    python -m specgen.demo.recipe prompts fresh.jsonl
    specgen tune --train --exit-layer specgen/demo/exit --prompts fresh.jsonl --seed 1 --device cpu --dtype float32 --out out/exit

Each head was trained with the command that its `head.yaml` names:

    specgen tune --train --methods medusa --corpus demo --steps 2500 --batch-size 4 --window 128 --learning-rate 0.015
    specgen tune --train --methods eagle --corpus demo --steps 4500 --batch-size 4 --window 128 --learning-rate 0.008
    specgen tune --train --methods glide --corpus demo --steps 2500 --batch-size 4 --window 128 --learning-rate 0.005
"""
