"""The training conversations of ``synthetic:tiny-tools``: what users ask, in their wordings, and the model's turns."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from tool_world import (
    Call,
    Chance,
    Tool,
    any_tool,
    arithmetic,
    arithmetic_of,
    arithmetic_tool,
    look_up,
    look_up_tool,
    without_arguments,
)

from trtx.checkpoint.tasks import Split
from trtx.checkpoint.text import NOUNS, sentences

NO_TOOL = "I have no tool for that."
_OPENINGS = (
    "",
    "",
    "",
    "",
    "",
    "Hi! ",
    "Hello. ",
    "Hey, ",
    "Okay. ",
    "I have a question: ",
    "Please help me. ",
    "Now: ",
)
_ASKINGS = (
    "What is {}?", "What is {}?", "What is {}?", "What's {}?", "Tell me {}.", "Please tell me {}.", "Give me {}.",
    "Show me {}.", "I need {}.", "I want to know {}.", "Find {}.", "Get {}.", "Look up {}.", "{}?",
    "Can you tell me {}?", "Could you look up {}?", "Do you know {}?", "I would like to know {}, please.",
)  # fmt: skip
_ADVERBS = ("", "", "", "", "", "", " today", " now", " right now", " please")
_LATER = ("", " And", " Then", " Also", " Also,", " And then")
_THEN = MappingProxyType({"add": "add {}", "subtract": "subtract {}", "multiply": "multiply by {}"})
_THEN_IT = MappingProxyType(
    {"add": "add {} to it", "subtract": "subtract {} from it", "multiply": "multiply the result by {}"}
)
_SMALL_TALK = (
    (("Hello!", "Hi!", "Hi there!", "Hello", "Hey!", "Good morning!", "Good evening."), "Hello! How can I help?"),
    (("Thank you!", "Thanks!", "Thanks a lot.", "Thank you very much.", "Great, thanks!"), "You are welcome."),
    (("Who are you?", "What are you?", "Which model are you?", "What is your name?"),
     "I am a small model that calls tools."),
    (("What can you do?", "How can you help me?", "What can you help with?"), "I can call your tools."),
    (("How are you?", "How are you today?", "How do you do?"), "I am well, thank you."),
    (("Bye!", "Goodbye!", "See you later.", "Good night!"), "Goodbye!"),
)  # fmt: skip
_OTHER_WISHES = (
    "Tell me a joke.", "Write a poem about {}.", "Sing a song about {}.", "Who wrote {}?", "Why is {} so {}?",
    "Explain {} to me.", "Translate {} to French.", "What do you think about {}?", "Write a story about {} and {}.",
)  # fmt: skip
_SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a helpful AI assistant. Use the tools.", "Be brief.")


@dataclass(frozen=True, slots=True)
class Request:
    """One message of a user, and how the model answers it: calls, one after the other, and a last sentence.

    ``topics``: what the asked-for tools do; a request without calls is offered no tool of these topics.
    """

    kind: str
    text: str
    calls: tuple[Call, ...] = ()
    answer: str = ""
    thought: str = ""
    topics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation of one or several requests. ``messages`` and ``tools`` have the form of OpenAI's API.

    ``forced``: the last answer is a call in the form that a forced ``tool_choice`` asks for, and it is this text.
    """

    kinds: tuple[str, ...]
    tools: list[dict[str, Any]]
    messages: list[dict[str, Any]] = field(default_factory=list)
    forced: str | None = None


@dataclass(frozen=True, slots=True)
class Wording:
    """``asking``: a sentence with ``{}`` for the need, or the index of one of the call's own questions."""

    opening: str
    asking: str | int
    adverb: str
    has_mark: bool

    def text(self, need: str, questions: tuple[str, ...] = ()) -> str:
        if isinstance(self.asking, int):
            text = questions[self.asking % len(questions)]
        else:
            text = self.asking.format(need + self.adverb)
            text = text[0].upper() + text[1:]
        return self.opening + (text if self.has_mark else text.rstrip("?."))


def _wording(chance: Chance, *, has_own: bool = False) -> Wording:
    found: dict[str, Wording] = {}

    def draw(rng: random.Random) -> str:
        asking = rng.randrange(8) if has_own and rng.random() < 0.5 else rng.choice(_ASKINGS)
        wording = Wording(rng.choice(_OPENINGS), asking, rng.choice(_ADVERBS), rng.random() < 0.8)
        found[str(wording)] = wording
        return str(wording)

    return found[chance.of_split("wording", draw)]


def _question(chance: Chance, call: Call, *, has_opening: bool = True) -> str:
    """A sentence that asks for ``call``."""
    wording = _wording(chance, has_own=bool(call.questions))
    text = wording.text(call.need, call.questions)
    if not has_opening:
        text = text.removeprefix(wording.opening)
    return text if chance.rng.random() >= 0.12 else text[0].lower() + text[1:]


def _answered(kind: str, text: str, *calls: Call) -> Request:
    return Request(kind, text, calls, " ".join(call.answer for call in calls), "I have what I need.")


def _one(chance: Chance) -> Call:
    """Any single call, in the proportion of the training."""
    rng = chance.rng
    kind = rng.random()
    if kind < 0.35:
        return arithmetic(chance)
    if kind < 0.93:
        return look_up(chance, chance.demo_topic() if kind < 0.65 else chance.new_topic())
    return without_arguments(chance, chance.demo_topic() if rng.random() < 0.5 else chance.new_topic())


def _arithmetic(chance: Chance) -> Request:
    call = arithmetic(chance)
    return _answered("arithmetic", _question(chance, call), call)


def _look_up(chance: Chance) -> Request:
    call = look_up(chance, chance.demo_topic())
    return _answered("look-up", _question(chance, call), call)


def _new_topic(chance: Chance) -> Request:
    call = look_up(chance, chance.new_topic())
    return _answered("look-up, unseen tool", _question(chance, call), call)


def _without_arguments(chance: Chance) -> Request:
    rng = chance.rng
    call = without_arguments(chance, chance.demo_topic() if rng.random() < 0.5 else chance.new_topic())
    return _answered("no arguments", _question(chance, call), call)


def _two(chance: Chance) -> Request:
    """Two needs in one message, of two tools or twice of one."""
    rng = chance.rng
    first = _one(chance)
    while not first.tool.parameters:
        first = _one(chance)
    if rng.random() < 0.3:
        if first.tool.topic in _THEN:
            second = arithmetic(chance, first.tool)
        else:
            second = look_up(chance, first.tool.topic, first.tool)
    else:
        second = _one(chance)
        while second.tool.topic == first.tool.topic or second.tool.name == first.tool.name:
            second = _one(chance)
    if rng.random() < 0.6:
        text = _wording(chance).text(f"{first.need} and {second.need}")
    else:
        start, later = _question(chance, first), _question(chance, second, has_opening=False)
        start += "" if start.endswith(("?", ".")) else rng.choice("?.")
        adverb = rng.choice(_LATER)
        text = f"{start}{adverb} {later[0].lower() + later[1:] if adverb else later}"
    return _answered("two calls", text, first, second)


def _chained_arithmetic(chance: Chance) -> Request:
    """A second operation on the result of the first."""
    rng = chance.rng
    first = arithmetic(chance)
    while first.result.startswith("{"):
        first = arithmetic(chance)
    operation = rng.choice(list(_THEN))
    tool = first.tool if operation == first.tool.topic else arithmetic_tool(rng, operation)
    before, by = chance.numbers(first.result)
    second = arithmetic_of(rng, tool, before, by)
    then = rng.choice((_THEN, _THEN_IT))[operation].format(by)
    start = _question(chance, first).rstrip("?.")
    text = start + rng.choice((f", then {then}", f" and then {then}", f". Then {then}")) + rng.choice((".", "", "?"))
    return Request(
        "chained arithmetic", text, (first, second), f"The result is {second.result}.", "I have what I need."
    )


def _chained_look_up(chance: Chance) -> Request:
    """The topic of what another tool finds, such as the weather in the capital of France."""
    rng = chance.rng
    inner, outer = (chance.demo_topic() if rng.random() < 0.5 else chance.new_topic() for _ in range(2))
    while inner == outer:
        outer = chance.new_topic()
    first = replace(look_up(chance, inner, look_up_tool(rng, inner)), result=chance.entity())
    second = look_up(chance, outer, look_up_tool(rng, outer), first.result)
    preposition = second.need.split(" ")[2]
    text = _wording(chance).text(f"the {outer} {preposition} {first.need}")
    return Request("chained look-ups", text, (first, second), second.answer, "I have what I need.")


def _no_tool(chance: Chance) -> Request:
    rng = chance.rng
    if rng.random() < 0.75:
        call = _one(chance)
        return Request("no tool fits", _question(chance, call), (), NO_TOOL, "No tool fits.", (call.tool.topic,))
    wish = rng.choice(_OTHER_WISHES) if rng.random() < 0.7 else _text(rng, 1)
    while "{}" in wish:
        wish = wish.replace("{}", rng.choice(NOUNS), 1)
    return Request("no tool fits", wish, (), NO_TOOL, "No tool fits.")


def _text(rng: random.Random, count: int) -> str:
    return "".join(itertools.islice(sentences(rng.getrandbits(40), count + 1), 1, None)).strip()


def _small_talk(chance: Chance) -> Request:
    texts, answer = chance.rng.choice(_SMALL_TALK)
    return Request("small talk", chance.rng.choice(texts), (), answer, "No tool is needed.")


MIX: MappingProxyType[Callable[[Chance], Request], float] = MappingProxyType(
    {
        _arithmetic: 4.0, _look_up: 4.0, _new_topic: 3.0, _without_arguments: 1.0, _two: 4.0,
        _chained_arithmetic: 1.5, _chained_look_up: 1.5, _no_tool: 2.5, _small_talk: 1.0,
    }
)  # fmt: skip


def offered(tool: Tool, rng: random.Random) -> dict[str, Any]:
    """``tool`` as a client describes it. What the template doesn't print differs from client to client."""
    properties: dict[str, Any] = {
        name: {"type": kind} if kind != "any" else {} for name, kind in tool.parameters.items()
    }
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if not tool.parameters or rng.random() < 0.9:
        schema["required"] = list(tool.parameters)
    return {"type": "function", "function": {"name": tool.name, "parameters": schema}}


def conversations(
    split: Split,
    seed: int,
    kind: Callable[[Chance], Request] | None = None,
    *,
    thinks: bool = False,
    most_requests: int = 3,
) -> Iterator[Conversation]:
    """Yields conversations of one split without end, determined by the seed.

    ``kind``: each has one request of this kind, with thoughts if ``thinks``. Otherwise the conversations are those of
    the training: up to ``most_requests`` requests, some with thoughts, some with a forced call at the end.
    """
    rng = random.Random(f"{seed}/{split}/{kind.__name__ if kind else ''}")
    chance = Chance(rng, split)
    while True:
        count = 1 if kind is not None else min(most_requests, rng.choices((1, 2, 3), (7, 2.5, 0.5))[0])
        drawn = [(kind or rng.choices(list(MIX), list(MIX.values()))[0])(chance) for _ in range(count)]
        if (tools := _tools(chance, drawn)) is None:
            continue
        if kind is None:
            yield _training_conversation(rng, drawn, tools)
        else:
            yield _conversation(rng, drawn, tools, thinks=thinks)


def _tools(chance: Chance, requests: list[Request]) -> list[dict[str, Any]] | None:
    """The tools that a client offers; None if the requests need two different tools of one name or topic."""
    rng = chance.rng
    tools: dict[str, Tool] = {}
    for call in (call for request in requests for call in request.calls):
        if tools.setdefault(call.tool.name, call.tool) != call.tool:
            return None
    topics = [tool.topic for tool in tools.values()]
    missing = {topic for request in requests for topic in request.topics}
    if len(set(topics)) < len(topics) or missing & set(topics):
        return None
    for _ in range(rng.choices((0, 1, 2, 3, 4), (3, 4, 3, 1, 1))[0]):
        tool = any_tool(chance)
        is_new = tool.topic not in topics and tool.name not in tools
        if is_new and not {tool.topic, *tool.name.split("_")} & (missing | set(topics)):
            tools[tool.name] = tool
            topics.append(tool.topic)
    return [offered(tool, rng) for tool in rng.sample(list(tools.values()), len(tools))]


def _conversation(
    rng: random.Random, requests: list[Request], tools: list[dict[str, Any]], *, thinks: bool
) -> Conversation:
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.35:
        text = rng.choice(_SYSTEM_PROMPTS) if rng.random() < 0.6 else _text(rng, rng.randint(1, 3))
        messages.append({"role": "system", "content": text})
    for request in requests:
        messages += _turns(request, thinks=thinks)
    return Conversation(tuple(request.kind for request in requests), tools, messages)


def _training_conversation(rng: random.Random, requests: list[Request], tools: list[dict[str, Any]]) -> Conversation:
    thinks = rng.random() < 0.25
    made = _conversation(rng, requests, tools, thinks=thinks)
    calls = requests[-1].calls
    if thinks or not calls or rng.random() >= 0.08:
        return made
    last = max(at for at, message in enumerate(made.messages) if message["role"] == "user")
    forced = _forced(calls[0], is_named=rng.random() < 0.5)
    return replace(made, messages=made.messages[: last + 1], forced=forced)


def _turns(request: Request, *, thinks: bool) -> Iterator[dict[str, Any]]:
    yield {"role": "user", "content": request.text}
    for call in request.calls:
        function = {"name": call.tool.name, "arguments": call.arguments}
        yield _thought({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
                       call.thought if thinks else None)  # fmt: skip
        yield {"role": "tool", "content": call.result}
    yield _thought({"role": "assistant", "content": request.answer}, request.thought if thinks else None)


def _thought(message: dict[str, Any], thought: str | None) -> dict[str, Any]:
    return {**message, "reasoning_content": thought} if thought else message


def _forced(call: Call, *, is_named: bool) -> str:
    """The answer to a forced ``tool_choice``: of a named tool, Dynamo asks for the arguments; else for a list."""
    if is_named:
        return json.dumps(call.arguments, ensure_ascii=False)
    return json.dumps([{"name": call.tool.name, "parameters": call.arguments}], ensure_ascii=False)
