"""The process that lm-eval runs in: ``python -m trtx.evals.session``. Nothing else imports what is here."""
