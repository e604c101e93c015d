"""Speculative decoding itself: drafters, length policies, verifiers and schedules. The models are loaded elsewhere."""
