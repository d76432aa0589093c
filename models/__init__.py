"""Transformers in many normalizations, placements, relaxations, and the clipping rules beside them."""
