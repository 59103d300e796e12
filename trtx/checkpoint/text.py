"""Generates English-like text to train the synthetic tokenizers on, which needs no data file and no licence."""

from __future__ import annotations

import random
from collections.abc import Iterator


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_FUNCTION = _words(
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were her all she there would their we him been has when who will more no if out so said what up its about "
    "into than them can only other new some could time these two may then do first any my now such like our over me "
    "even most made after also did many before must through back where much your way well down should because each "
    "just those how too good very make still see own under never same another while last might us great thou thy thee "
    "shall hath come go let know here again upon yet nor ever speak tell give take hear leave stand think call bring"
)
_NOUN = _words(
    "man king lord lady house hand heart eye day night world life death love name word time year people place thing "
    "part work case point fact group number water room mother father brother sister friend enemy child woman city "
    "country state school book story paper letter line page road river sea ship field tree stone fire light sun moon "
    "star wind rain snow winter summer spring morning evening table chair door window wall floor bed cup bread wine "
    "horse dog cat bird fish wolf lion crown sword war peace law court judge prince duke queen soldier army battle "
    "honour truth reason mind soul body face voice tongue blood tear smile dream thought hope fear grief joy hour "
    "minute second week month hill mountain forest garden flower rose leaf fruit apple orange lemon grape melon peach "
    "pear plum cherry engine model token block cache memory system machine process server client request answer "
    "question result measure report value price market money gold silver iron glass wood cloth colour music song dance "
    "play game rule plan order change end beginning side corner middle bottom top north south east west"
)
_VERB = _words(
    "look walk run turn move follow find keep hold carry send show seem become feel need want help start stop open "
    "close read write learn teach build break cut pull push fall rise grow live die kill save serve pay buy sell meet "
    "join part win lose fight sing sleep wake eat drink wear wash cook ask answer reply wonder believe trust doubt "
    "remember forget wish pray swear promise refuse accept return arrive depart remain appear pass cross reach touch "
    "strike measure count compare choose decide create destroy cover hide seek watch listen laugh weep cry shout"
)
_ADJECTIVE = _words(
    "old young little long high low large small big short early late right wrong true false poor rich free full empty "
    "strong weak hard soft hot cold warm cool bright dark clear deep wide narrow sweet bitter fair foul noble gentle "
    "proud humble wise mad happy sad angry quiet loud quick slow heavy light green blue red yellow white black brown "
    "grey golden dear cruel kind brave simple single common public private general certain ready sure"
)
_SUFFIXES = ("", "", "", "", "s", "ed", "ing", "er", "ly", "ness", "'s", "ful")
_ENDS = (". ", ". ", ". ", ", ", ", ", "; ", "? ", "! ", ": ", ".\n", ".\n\n", " - ")

# The words of the training tasks.
NOUNS = _NOUN


def sentences(seed: int, count: int) -> Iterator[str]:
    """Yields ``count`` pieces of text, determined by the seed: prose, numbers, JSON, some code."""
    rng = random.Random(seed)
    for index in range(count):
        if index % 23 == 0:
            key, other = rng.choice(_NOUN), rng.choice(_ADJECTIVE)
            yield f'{{"{key}": {rng.randrange(1000)}, "{other}": "{rng.choice(_VERB)}", "ok": true, "list": [1, 2]}}\n'
        elif index % 29 == 0:
            name, argument, other = rng.choice(_VERB), rng.choice(_NOUN), rng.choice(_NOUN)
            yield f"def {name}({argument}):\n    return {other} + {rng.randrange(99)}\n"
        else:
            yield _sentence(rng)


def _sentence(rng: random.Random) -> str:
    words: list[str] = []
    for _ in range(rng.randint(4, 16)):
        kind = rng.random()
        if kind < 0.5:
            words.append(rng.choice(_FUNCTION))
        elif kind < 0.75:
            words.append(rng.choice(_NOUN) + rng.choice(_SUFFIXES))
        elif kind < 0.88:
            words.append(rng.choice(_VERB) + rng.choice(_SUFFIXES))
        elif kind < 0.98:
            words.append(rng.choice(_ADJECTIVE))
        else:
            words.append(str(rng.randrange(10000)))
    first = words[0].upper() if rng.random() < 0.1 else words[0].capitalize()
    return " ".join([first, *words[1:]]) + rng.choice(_ENDS)
