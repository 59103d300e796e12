"""Judges sweep points: validity checks, SLO objectives, and the gate against a baseline."""
