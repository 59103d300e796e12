"""One prompt whose tokens a runner, or transformers' model, gives log-probabilities."""

from __future__ import annotations

import torch
from runner_player import Player, random_prompt

from trtx.torch_engine.llmapi.sampling import SamplingParams
from trtx.torch_engine.step import ModelRunner

PROMPT = random_prompt(60, 5)


def logprobs_of(runner: ModelRunner, *, chunk: int = 10_000) -> torch.Tensor:
    """Of all tokens but the first, ``[59]``; ``chunk``: tokens of a step at most."""
    player = Player(runner)
    playing = player.add(PROMPT, sampling=SamplingParams(prompt_logprobs=0))
    player.finish([playing], 1, chunk=chunk)
    entries = [entry for result in playing.results for entry in result.prompt_logprobs or []]
    return torch.tensor([entry[token].logprob for entry, token in zip(entries, PROMPT[1:], strict=True)])


def reference(model: torch.nn.Module) -> torch.Tensor:
    """The same of transformers' model."""
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
