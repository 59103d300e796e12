"""The small world of ``synthetic:tiny-tools``: the tools, what a user asks for, and the calls that answer it.

A hash of the content decides a sample's split, not chance: the entities, pairs of numbers and wordings of the held-out
split never occur in training.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trtx.checkpoint.tasks import HELD_OUT_SHARE, Split
from trtx.checkpoint.text import NOUNS


def _split(text: str, separator: str = " ") -> tuple[str, ...]:
    return tuple(text.split(separator))


CITIES = _split(
    "Amsterdam, Ankara, Athens, Auckland, Austin, Baghdad, Bangkok, Barcelona, Beijing, Belgrade, Berlin, Bern, "
    "Bogota, Boston, Brisbane, Brussels, Bucharest, Budapest, Buenos Aires, Cairo, Cape Town, Caracas, Chicago, "
    "Copenhagen, Dakar, Dallas, Delhi, Denver, Detroit, Dhaka, Dubai, Dublin, Edinburgh, Frankfurt, Geneva, "
    "Glasgow, Hamburg, Hanoi, Havana, Helsinki, Hong Kong, Houston, Istanbul, Jakarta, Jerusalem, Johannesburg, "
    "Kabul, Karachi, Kiev, Kyoto, Lagos, Lima, Lisbon, Liverpool, London, Los Angeles, Lyon, Madrid, Manchester, "
    "Manila, Marseille, Melbourne, Mexico City, Miami, Milan, Montreal, Moscow, Mumbai, Munich, Nairobi, Naples, "
    "New York, Osaka, Oslo, Ottawa, Paris, Perth, Philadelphia, Phoenix, Portland, Prague, Quito, Reykjavik, Riga, "
    "Rio de Janeiro, Rome, Rotterdam, San Diego, San Francisco, Santiago, Seattle, Seoul, Shanghai, Singapore, "
    "Sofia, Stockholm, Sydney, Taipei, Tallinn, Tehran, Tel Aviv, Tokyo, Toronto, Tunis, Turin, Valencia, "
    "Vancouver, Venice, Vienna, Vilnius, Warsaw, Washington, Wellington, Yerevan, Zagreb, Zurich, France, Germany, "
    "Italy, Spain, Japan, China, India, Brazil, Canada, Mexico, Norway, Sweden, Poland, Greece, Egypt, Kenya, Peru, "
    "Chile",
    ", ",
)
_ONSETS = _split("b c d f g h j k l m n p r s t v w y z br ch cl dr fr gr kr pl sh st th tr")
_VOWELS = _split("a e i o u a e i o u ai ea ee ie oo ou á é í ö ü ã")
_CODAS = ("", "", "", "n", "r", "s", "l", "m", "t", "k", "ng", "rd", "st", "x")

_PLACE_KEYS = ("city", "location", "place", "town", "city_name", "country", "where")
_ITEM_KEYS = ("name", "item", "product", "key", "id", "query", "word", "symbol", "of")
_UNIT_KEYS, _UNITS = ("unit", "units", "scale"), ("celsius", "fahrenheit")
_NUMBER_KEYS = (
    ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("num1", "num2"), ("number1", "number2"),
    ("first_number", "second_number"), ("n", "m"),
)  # fmt: skip
# Of each operation: the tools' names, the word between the two numbers, its sign, and the orders to do it.
_OPERATIONS = {
    "add": (
        ("add", "add_numbers", "sum", "plus", "calculate_sum", "addNumbers"),
        "plus",
        "+",
        ("add {a} and {b}", "add {a} to {b}"),
    ),
    "subtract": (("subtract", "subtract_numbers", "minus", "difference"), "minus", "-", ("subtract {b} from {a}",)),
    "multiply": (
        ("multiply", "multiply_numbers", "times", "product"),
        "times",
        "*",
        ("multiply {a} by {b}", "multiply {a} and {b}"),
    ),
}
# The topics that most demos use. All other topics are nouns and made-up words.
_PLACE_TOPICS = ("weather", "time", "temperature", "population", "capital", "forecast")
_ITEM_TOPICS = ("price", "stock", "color", "weight", "meaning", "owner", "status")
_TOOL_NAMES = (
    "get_{}",
    "get_{}",
    "get_{}",
    "{}",
    "get_current_{}",
    "find_{}",
    "lookup_{}",
    "fetch_{}",
    "{}_of",
    "{}_tool",
)
_FIXED_TOPIC_SPELLINGS = ("getWeather", "getTime", "getPrice", "getCapital", "getTemperature")
_OTHER_TOOLS = (
    ("send_email", ("to", "subject")), ("search_web", ("query",)), ("book_flight", ("origin", "destination")),
    ("set_alarm", ("hour",)), ("play_music", ("song",)), ("translate", ("text", "language")), ("open_door", ()),
)  # fmt: skip
_CONDITIONS = ("sunny", "rainy", "cloudy", "windy", "cold", "hot", "snowing", "foggy", "clear", "mild", "stormy")


def is_held_out(kind: str, key: str) -> bool:
    digest = hashlib.sha256(f"{kind}/{key}".encode()).digest()
    return int.from_bytes(digest[:4], "little") % HELD_OUT_SHARE == 0


@dataclass(frozen=True, slots=True)
class Chance:
    """A source of random choices within one split."""

    rng: random.Random
    split: Split

    def of_split(self, kind: str, draw: Callable[[random.Random], str]) -> str:
        """Draws until the content is in the split."""
        while is_held_out(kind, drawn := draw(self.rng)) != (self.split == "held-out"):
            pass
        return drawn

    def entity(self) -> str:
        return self.of_split("entity", _entity)

    def new_topic(self) -> str:
        return self.of_split("topic", _topic_word)

    def demo_topic(self) -> str:
        """One of the topics that most demos use. They are the same in both splits."""
        return self.rng.choice(_PLACE_TOPICS + _ITEM_TOPICS)

    def numbers(self, first: str | None = None) -> tuple[str, str]:
        """Two numbers; ``first`` fixes the first of them."""
        pair = self.of_split("numbers", lambda rng: f"{first or number(rng)} {number(rng)}")
        a, _, b = pair.partition(" ")
        return a, b


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the request offers. ``parameters``: the type of each required parameter, by its name.

    ``topic`` identifies what the tool does; a request offers one tool of a topic.
    """

    topic: str
    name: str
    parameters: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Call:
    """One thing that the user needs, the call that finds it, and the tool's result.

    ``need``: a noun phrase such as "the weather in Paris". ``questions``: whole sentences that ask for it, where the
    need has wordings of its own.
    """

    tool: Tool
    arguments: dict[str, Any]
    need: str
    result: str
    questions: tuple[str, ...] = ()

    @property
    def thought(self) -> str:
        return f"I need {self.need}, so I call {self.tool.name}."

    @property
    def answer(self) -> str:
        return f"{self.need[0].upper()}{self.need[1:]} is {self.result}."


def made_up_word(rng: random.Random) -> str:
    count = rng.choices((1, 2, 3, 4), (2, 4, 3, 1))[0]
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(count))


def _entity(rng: random.Random) -> str:
    """Draws the name of a place, person or thing."""
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(CITIES)
    if kind < 0.6:
        return made_up_word(rng).capitalize()
    if kind < 0.68:
        return f"{made_up_word(rng).capitalize()} {made_up_word(rng).capitalize()}"
    if kind < 0.76:
        return f"{rng.choice(('New', 'San', 'Saint', 'Port', 'Los', 'El', 'Old'))} {made_up_word(rng).capitalize()}"
    if kind < 0.86:
        return rng.choice(NOUNS)
    if kind < 0.9:
        return made_up_word(rng)
    if kind < 0.94:
        return rng.choice(CITIES).lower()
    if kind < 0.96:
        return _digits(rng)
    letters = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(1, 4)))
    return letters + rng.choice(("", "-", "_")) + str(rng.randrange(10 ** rng.randint(1, 4)))


def _digits(rng: random.Random) -> str:
    return str(rng.randrange(10, 100_000))


def number(rng: random.Random) -> str:
    drawn = str(rng.randrange(10 ** rng.choices((1, 2, 3, 4, 6), (3, 5, 3, 2, 1))[0]))
    if rng.random() < 0.06:
        drawn += f".{rng.choice(('', rng.randrange(10)))}{rng.randint(1, 9)}"
    return drawn if rng.random() >= 0.04 or drawn == "0" else f"-{drawn}"


def _topic_word(rng: random.Random) -> str:
    """A topic that no demo needs: it makes the model compare the question's words with the tools' names."""
    return rng.choice(NOUNS) if rng.random() < 0.6 else made_up_word(rng)


def arithmetic_tool(rng: random.Random, operation: str) -> Tool:
    kind = rng.choices(("integer", "number", "string"), (5, 5, 1))[0]
    return Tool(operation, rng.choice(_OPERATIONS[operation][0]), dict.fromkeys(rng.choice(_NUMBER_KEYS), kind))


def look_up_tool(rng: random.Random, topic: str, *, has_argument: bool = True, has_unit: bool = False) -> Tool:
    spellings = [name for name in _FIXED_TOPIC_SPELLINGS if name[3:].lower() == topic]
    name = rng.choice(spellings) if spellings and rng.random() < 0.1 else rng.choice(_TOOL_NAMES).format(topic)
    keys = _PLACE_KEYS if topic in _PLACE_TOPICS else _ITEM_KEYS
    key = rng.choice(keys) if rng.random() < 0.8 else rng.choice(NOUNS)
    parameters = {key: "string"} if has_argument else {}
    if has_unit:
        parameters[rng.choice(_UNIT_KEYS)] = "string"
    return Tool(topic, name, parameters)


def other_tool(rng: random.Random) -> Tool:
    """A tool that no question fits."""
    keys: tuple[str, ...]
    if rng.random() < 0.5:
        name, keys = rng.choice(_OTHER_TOOLS)
    else:
        name = f"{made_up_word(rng)}_{rng.choice(NOUNS)}"
        keys = tuple(rng.sample(NOUNS, rng.randint(0, 3)))
    return Tool(name, name, {key: rng.choice(("string", "integer", "boolean", "any")) for key in keys})


def any_tool(chance: Chance) -> Tool:
    """A tool that the request offers beside those that it needs."""
    rng = chance.rng
    kind = rng.random()
    if kind < 0.25:
        return arithmetic_tool(rng, rng.choice(list(_OPERATIONS)))
    if kind < 0.5:
        topic = chance.demo_topic()
    elif kind < 0.75:
        topic = chance.new_topic()
    else:
        return other_tool(rng)
    return look_up_tool(rng, topic, has_argument=rng.random() < 0.9, has_unit=rng.random() < 0.1)


def as_value(text: str, kind: str) -> Any:
    """``text`` as a JSON value of the parameter's type."""
    return json.loads(text) if kind in ("integer", "number") else text


def arithmetic(chance: Chance, tool: Tool | None = None) -> Call:
    rng = chance.rng
    operation = tool.topic if tool is not None else rng.choice(list(_OPERATIONS))
    a, b = chance.numbers()
    return arithmetic_of(rng, tool or arithmetic_tool(rng, operation), a, b)


def arithmetic_of(rng: random.Random, tool: Tool, a: str, b: str) -> Call:
    _, word, sign, orders = _OPERATIONS[tool.topic]
    (first, kind), (second, _) = tool.parameters.items()
    left, right = json.loads(a), json.loads(b)
    value = {"add": left + right, "subtract": left - right, "multiply": left * right}[tool.topic]
    # Half of the results are wrong, so that the model copies the result and does not compute it.
    result = str(round(value, 4)) if rng.random() < 0.5 else number(rng)
    if rng.random() < 0.15:
        result = json.dumps({rng.choice(("result", "value", "answer", tool.topic)): json.loads(result)})
    order = rng.choice(orders).format(a=a, b=b)
    questions = (
        f"{order[0].upper()}{order[1:]}.", f"Please {order}.", f"{a} {sign} {b}", f"What is {a} {sign} {b}?",
        f"{a}{sign}{b}", f"What is {a}{sign}{b}?", f"How much is {a} {word} {b}?", f"Can you {order}?",
    )  # fmt: skip
    return Call(tool, {first: as_value(a, kind), second: as_value(b, kind)}, f"{a} {word} {b}", result, questions)


def look_up(chance: Chance, topic: str, tool: Tool | None = None, name: str | None = None) -> Call:
    """Asks for a topic of one entity, such as the weather in Paris."""
    rng = chance.rng
    if tool is None:
        tool = look_up_tool(rng, topic, has_unit=topic in ("weather", "temperature") and rng.random() < 0.2)
        if len(tool.parameters) == 1 and rng.random() < 0.05:
            tool = Tool(topic, tool.name, dict.fromkeys(tool.parameters, "integer"))
    keys = list(tool.parameters)
    is_number = tool.parameters[keys[0]] == "integer"
    name = name or (chance.of_split("entity", _digits) if is_number else chance.entity())
    arguments = {keys[0]: as_value(name, tool.parameters[keys[0]])}
    need, questions = f"the {topic} {_preposition(rng, topic)} {name}", list[str]()
    if len(keys) > 1:
        unit = rng.choice(_UNITS) if rng.random() < 0.6 else None
        arguments[keys[1]] = unit or _UNITS[0]
        need += f" in {unit}" if unit else ""
    elif topic == "weather":
        questions = [f"How is the weather in {name}?", f"What's the weather like in {name}?",
                     f"What is the weather like in {name} today?", f"How's the weather in {name} today?"]  # fmt: skip
    elif topic == "time":
        questions = [f"What time is it in {name}?", f"What time is it in {name} now?",
                     f"What is the current time in {name}?", f"Which time is it in {name}?"]  # fmt: skip
    return Call(tool, arguments, need, _result(chance, topic), tuple(questions))


def _preposition(rng: random.Random, topic: str) -> str:
    if topic in ("weather", "time", "temperature"):
        return "in" if rng.random() < 0.95 else "for"
    return rng.choice(("of", "of", "of", "in", "for", "at"))


def without_arguments(chance: Chance, topic: str) -> Call:
    rng = chance.rng
    tool = look_up_tool(rng, topic, has_argument=False)
    questions = ("What time is it?", "What time is it now?") if topic == "time" else ()
    return Call(tool, {}, f"the {topic}", _result(chance, topic), questions)


def _result(chance: Chance, topic: str) -> str:
    rng = chance.rng
    kind = rng.random()
    if topic == "time" and kind < 0.4:
        return f"{rng.randrange(24)}:{rng.randrange(60):02d}"
    if topic in ("weather", "forecast") and kind < 0.6:
        return rng.choice(
            (
                rng.choice(_CONDITIONS),
                f"{rng.choice(_CONDITIONS)}, {rng.randint(-20, 40)} degrees",
                f"{rng.randint(-20, 40)} degrees and {rng.choice(_CONDITIONS)}",
                json.dumps({"temperature": rng.randint(-20, 40), "condition": rng.choice(_CONDITIONS)}),
                f"It is always {rng.choice(_CONDITIONS)} here!",
            )
        )
    if kind < 0.75:
        return rng.choice((number(rng), chance.entity(), made_up_word(rng), f"{number(rng)} {rng.choice(NOUNS)}"))
    if kind < 0.85:
        return json.dumps(
            {rng.choice((topic, "result", "value", rng.choice(NOUNS))): rng.choice((chance.entity(), 7, 42))},
            ensure_ascii=False,
        )
    words = [rng.choice(NOUNS) if rng.random() < 0.6 else made_up_word(rng) for _ in range(rng.randint(2, 5))]
    return " ".join(words) + rng.choice(("", "", "!", "."))
