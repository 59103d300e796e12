"""Baselines: their store, the conditions under which they were measured, and comparisons with them."""
