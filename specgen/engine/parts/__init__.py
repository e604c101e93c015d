"""Trained heads that draft from the target's own hidden states: Medusa, EAGLE-1, -2 and -3, GliDe."""
