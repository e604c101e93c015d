"""Trained parts of a target, which draft from its hidden states or its KV cache: exit layers, heads
(Medusa, EAGLE, GliDe, DFlash, DSpark), and drafting layers (MTP)."""
