"""Probes the request fields and outputs that an attached server supports, starting with the richest request."""

from __future__ import annotations

from collections.abc import Sequence

from trtx.errors import UsageError
from trtx.evals.parity.asking import Server, ask_once
from trtx.evals.parity.forms import Prompt

_OSL = 2
_LENGTH = 4  # tokens of the prompt


def find_server(url: str, model: str, api_key: str | None, ids: Sequence[int]) -> Server:
    """Probes a server with one short prompt, at most three times. ``ids``: the vocabulary from which prompts are drawn.

    Raises UsageError if no completion has tokens and log-probabilities that can be compared.
    """
    step = max(1, len(ids) // _LENGTH)
    prompt = Prompt(0, tuple(ids[::step][:_LENGTH]), None, asks_prompt_logprobs=True, cancel_after=None)
    plain = Prompt(0, prompt.token_ids, None, asks_prompt_logprobs=False, cancel_after=None)
    failure = ""
    for takes_nvext, asked in ((True, prompt), (True, plain), (False, plain)):
        server = Server(url, model, api_key, takes_nvext, asked.asks_prompt_logprobs)
        answer = ask_once(server, asked, osl=_OSL)
        if answer.failure is None:
            return server
        failure = answer.failure
    raise UsageError(
        f"{model} at {url} can't be compared ({failure}); expected /v1/completions that takes a prompt of token ids, "
        "min_tokens and ignore_eos, and streams each token's id (return_tokens_as_token_ids) with the likeliest five"
    )
