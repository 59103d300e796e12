"""lm-eval's model ``trtx``: converts lm-eval's instances to requests to the served topology, and the answers back.

Log-likelihood requests are tokenized by lm-eval (``TemplateLM``), which calls the tokenizer as lm-eval's ``hf`` model
does, so that both models score the same tokens.
"""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any, NamedTuple

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, postprocess_generated_text

from trtx.bench.answers import early_end, model_name
from trtx.config.wording import a_kind, quoted
from trtx.evals.forms import SampleRequest
from trtx.evals.messages import Endpoint, EndpointType
from trtx.evals.session.client import Client, ServerRefusal, ServerRequest
from trtx.evals.session.prompt_logprobs import PromptLogprobs, PromptScore

MOST_STOPS = 4  # limit of OpenAI's API
DEFAULT_MAX_TOKENS = 256  # lm-eval's default
SEED = 1234  # lm-eval's default
_SHOWN_END = 20  # characters of a prompt's end in error messages
_LOOKED_AT = 64  # characters of a prompt's end that problem_of tokenizes; tokens that join it to a choice are shorter


class Chat(NamedTuple):
    """The messages of a chat as JSON, because lm-eval represents a prompt by a single value."""

    prompt: str

    def encode(self, encoding: str) -> bytes:
        return self.prompt.encode(encoding)


class CannotAsk(Exception):
    """A sample can't be requested. The message is a sentence about the sample."""


class TooLong(CannotAsk):
    """A sample does not fit the context."""


class NoOwnToken(CannotAsk):
    """A choice adds no token to its prompt, or its prompt has no token, so the choice has no log-probability."""


@register_model("trtx")
class ServedModel(TemplateLM):  # type: ignore[misc]
    """One served model. ``tokenizer``: transformers' tokenizer; None: not available, so no log-likelihoods either."""

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        endpoint_type: EndpointType = "completions",
        endpoint: Endpoint | None = None,
        route: PromptLogprobs | None = None,
        context_length: int | None = None,
        concurrency: int = 8,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.endpoint_type = endpoint_type
        self.endpoint = endpoint
        self.route = route
        self.context_length = context_length  # tokens of prompt and answer together; None: unknown
        self._concurrency = concurrency

    # The tokenizer's interface for lm-eval.

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encodes like ``HFLM.tok_encode`` of lm-eval 0.4.13."""
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            options["add_special_tokens"] = False
        return list(self.tokenizer.encode(string, **options))

    @property
    def tokenizer_name(self) -> str:
        return "" if self.tokenizer is None else str(self.tokenizer.name_or_path)

    def messages(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> Chat | str:
        """The prompt of a generation task over chat, as messages.

        A prompt whose last message the model has to continue is rendered to text instead, because OpenAI's API can't
        continue a message.
        """
        if not add_generation_prompt:
            return self.apply_chat_template(chat_history, add_generation_prompt)
        return Chat(json.dumps(chat_history, ensure_ascii=False))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    # Requests and answers of an instance.

    def questions(self, instance: Instance, repeat: int = 0) -> list[ServerRequest]:
        """The HTTP requests for one of the repeated responses to ``instance``. Raises CannotAsk."""
        if instance.request_type == "generate_until":
            return [self._generation(*instance.args[:2], seed=SEED + repeat)]
        if self.route is None:
            raise ValueError("the task needs log-probabilities of prompts, and the server returns none")
        return [self.route.question(ids) for ids, _ in self._scored(instance)]

    def signature(self, instance: Instance) -> list[Any]:
        """The values that determine the answer to an instance, independently of the server."""
        prompt = instance.args[0]
        told = prompt.prompt if isinstance(prompt, Chat) else prompt
        return [instance.request_type, isinstance(prompt, Chat), told, *instance.args[1:]]

    def asked(self, instance: Instance, answers: list[dict[str, Any]]) -> SampleRequest | ServerRefusal:
        """Parses the answers to the :meth:`questions` of an instance."""
        prompt = instance.args[0]
        kind = instance.request_type
        named = dict.fromkeys(filter(None, (model_name(answer.get("model")) for answer in answers)))
        common = {
            "request": kind, "prompt": json.loads(prompt.prompt) if isinstance(prompt, Chat) else prompt,
            "models": tuple(named),
        }  # fmt: skip
        if kind == "generate_until":
            parameters = dict(instance.args[1])
            found = _generated(answers[0])
            if isinstance(found, ServerRefusal):
                return found
            text, reason = found
            stops = handle_stop_sequences(copy.copy(parameters.get("until")), None)
            kept = postprocess_generated_text(text, stops, None)
            return SampleRequest(
                **common, continuation=None, parameters=parameters, text=kept, logprob=None, is_greedy=None,
                finish_reason=reason,
            )  # fmt: skip
        assert self.route is not None
        scored = [
            self.route.scored(answer, ids, count)
            for answer, (ids, count) in zip(answers, self._scored(instance), strict=True)
        ]
        if refused := next((one for one in scored if isinstance(one, ServerRefusal)), None):
            return refused
        sums = [one for one in scored if isinstance(one, PromptScore)]
        is_rolling = kind == "loglikelihood_rolling"
        return SampleRequest(
            **common,
            continuation=None if is_rolling else instance.args[1],
            parameters={},
            text=None,
            logprob=sum(one.logprob for one in sums),
            is_greedy=None if is_rolling else all(one.is_greedy for one in sums),
            finish_reason=None,
        )

    def _generation(self, prompt: Chat | str, parameters: dict[str, Any], *, seed: int) -> ServerRequest:
        kwargs = dict(parameters)
        kwargs.pop("do_sample", None)
        stops = [stop for stop in handle_stop_sequences(copy.copy(kwargs.pop("until", None)), None) if stop]
        # Removes all three from kwargs. The first that is set applies, in the same order as in lm-eval's hf model.
        limits = [kwargs.pop(name, None) for name in ("max_gen_toks", "max_new_tokens", "max_tokens")]
        body = {
            "max_tokens": next((int(limit) for limit in limits if limit is not None), DEFAULT_MAX_TOKENS),
            "temperature": kwargs.pop("temperature", 0.0),
            "seed": seed,
            **({"stop": stops[:MOST_STOPS]} if stops else {}),
            **kwargs,
        }
        if isinstance(prompt, Chat):
            return ServerRequest("chat/completions", {"messages": json.loads(prompt.prompt), **body})
        self._check_fits(prompt, body["max_tokens"])
        if self.endpoint_type == "chat":  # the prompt is rendered already, including special tokens
            return ServerRequest("completions", {"prompt": self.tok_encode(prompt, add_special_tokens=False), **body})
        if self.tokenizer is not None and prompt:
            # Send token ids, as for log-likelihoods, because servers add different special tokens to a text.
            return ServerRequest("completions", {"prompt": self.tok_encode(prompt), **body})
        return ServerRequest("completions", {"prompt": prompt, **body})

    def _check_fits(self, prompt: str, room: int) -> None:
        if self.tokenizer is None or self.context_length is None:
            return
        self._check_length(len(self.tok_encode(prompt)), room)

    def _check_length(self, tokens: int, room: int) -> None:
        if self.context_length is not None and tokens + room > self.context_length:
            raise TooLong(
                f"its prompt has {tokens} tokens and asks for {room} more, and the engine's context holds "
                f"{self.context_length}"
            )

    def _scored(self, instance: Instance) -> list[tuple[list[int], int]]:
        """The token ids of each prompt, and the number of tokens at its end that are scored."""
        if instance.request_type == "loglikelihood_rolling":
            (text,) = instance.args[:1]
            ids = self.tok_encode(text)
            longest = len(ids) if self.context_length is None else self.context_length - 2
            windows = utils.get_rolling_token_windows(ids, self.prefix_token_id, max(1, longest), 1)
            pairs = [utils.make_disjoint_window(window) for window in windows]
        else:
            context, continuation = instance.args[:2]
            pairs = [self._pair(context, continuation)]
        found = [([*before, *after], len(after)) for before, after in pairs]
        for ids, _ in found:
            self._check_length(len(ids), 1)
        return found

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of a prompt and of its continuation, split as by ``TemplateLM.loglikelihood``. Raises NoOwnToken.

        Prompt and continuation are tokenized together. If the prompt alone has n tokens, the continuation's tokens are
        those after the first n. If there are none, the hf model of lm-eval 0.4.13 fails with an assertion, and other
        lm-eval backends return the empty sum 0 as the log-probability, which would make the choice certain.
        """
        if context:
            before, after = self._encode_pair(context, continuation)
        else:
            ids = self.tok_encode(continuation, add_special_tokens=False)
            is_prefix = ids[:1] == [self.prefix_token_id]
            before, after = (ids[:1], ids[1:]) if is_prefix else ([self.prefix_token_id], ids)
        if not after:
            raise NoOwnToken(
                f"the choice {quoted(continuation)} has no token of its own and can't be scored, because the tokenizer "
                f"joins it with the end of its prompt, {quoted(context[-_SHOWN_END:])}. Put a space between the two, "
                "with target_delimiter or at the end of doc_to_text"
            )
        if not before:
            raise NoOwnToken(
                f"the prompt of the choice {quoted(continuation)} has no token, so the choice can't be scored; let "
                "doc_to_text begin with more than space"
            )
        return before, after

    def problem_of(self, instance: Instance) -> str | None:
        """Returns why a choice can't be scored with any answer of the server; None if no problem was found.

        Only the end of the prompt is tokenized first, which costs a hundredth of the whole. A problem that only the
        whole prompt shows is found when the choice is requested.
        """
        if instance.request_type != "loglikelihood" or self.tokenizer is None:
            return None
        context, choice = instance.args[:2]
        try:
            self._pair(context[-_LOOKED_AT:], choice)
        except NoOwnToken:
            try:
                self._pair(context, choice)
            except NoOwnToken as error:
                return str(error)
        return None

    # lm-eval's interface, for `lm_eval.simple_evaluate(model=ServedModel(…))`.

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return [str(response) for response in asyncio.run(self._respond(requests))]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return asyncio.run(self._respond(requests))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return asyncio.run(self._respond(requests))

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
        raise NotImplementedError("requests are asked by text")

    async def _respond(self, requests: list[Instance]) -> list[Any]:
        assert self.endpoint is not None
        gate = asyncio.Semaphore(self._concurrency)
        async with Client(self.endpoint, self._concurrency) as client:

            async def respond(instance: Instance) -> Any:
                async with gate:
                    found = await self.answer(client, instance)
                if isinstance(found, ServerRefusal):
                    raise RuntimeError(found.reason)
                return found.response

            return list(await asyncio.gather(*map(respond, requests)))

    async def answer(self, client: Client, instance: Instance, repeat: int = 0) -> SampleRequest | ServerRefusal:
        """Requests one response to an instance. Raises ServerGone."""
        try:
            questions = self.questions(instance, repeat)
        except CannotAsk as error:
            return ServerRefusal(str(error))
        answers: list[dict[str, Any]] = []
        for question in questions:
            found = await client.ask(question)
            if isinstance(found, ServerRefusal):
                return found
            answers.append(found)
        return self.asked(instance, answers)


def refused_request(instance: Instance, reason: str) -> SampleRequest:
    """The request for a text whose schema the server refused."""
    prompt, parameters = instance.args[:2]
    return SampleRequest(
        request=instance.request_type, prompt=json.loads(prompt.prompt) if isinstance(prompt, Chat) else prompt,
        continuation=None, parameters=dict(parameters), text=None, logprob=None, is_greedy=None, finish_reason=None,
        refusal=reason,
    )  # fmt: skip


def _generated(answer: dict[str, Any]) -> tuple[str, str] | ServerRefusal:
    """Text and finish reason of an answer, which must have one choice, with the checks of ``trtx bench``."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1:
        count = len(choices) if isinstance(choices, list) and choices else "no"
        return ServerRefusal(f"the answer has {count} choices; expected one")
    if not isinstance(choices[0], dict):
        return ServerRefusal(f"the answer's choice is {a_kind(choices[0])}; expected an object with a text")
    (choice,) = choices
    if fault := early_end(choice.get("finish_reason")):
        return ServerRefusal(fault)
    part, name = (choice["message"], "content") if "message" in choice else (choice, "text")
    if not isinstance(part, dict) or name not in part:
        return ServerRefusal(f"the answer's choice has no {name}")
    text = part[name]
    if text is None:
        beside = next((other for other in ("reasoning_content", "reasoning", "tool_calls") if part.get(other)), None)
        if beside is None and _stopped_at_once(answer, choice):
            return "", "stop"
        told = f", beside {beside}" if beside else ""
        return ServerRefusal(f"the answer's {name} is null{told}; expected text")
    if not isinstance(text, str):
        return ServerRefusal(f"the answer's {name} is {a_kind(text)}; expected text")
    return text, str(choice["finish_reason"])


def _stopped_at_once(answer: dict[str, Any], choice: dict[str, Any]) -> bool:
    """Whether the model generated no text, for which Dynamo and other servers return null over chat.

    One completion token is permitted, because some servers count the end token.
    """
    usage = answer.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return choice["finish_reason"] == "stop" and type(tokens) is int and tokens <= 1
