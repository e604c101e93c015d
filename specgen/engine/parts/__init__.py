"""Trained parts of a target, which draft from its hidden states or its KV cache: exit layers,
Medusa, EAGLE-1 to 3, GliDe."""
