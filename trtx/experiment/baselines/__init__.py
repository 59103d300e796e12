"""Baselines: their store, the conditions they were measured under, and comparisons with them."""
