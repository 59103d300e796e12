"""What a sweep point is worth: checks of its validity, objectives, and the gate against a baseline."""
