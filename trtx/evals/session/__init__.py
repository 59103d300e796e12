"""lm-eval's process, ``python -m trtx.evals.session``. No other code imports these modules."""
