"""Long prompts with planted carriers, after the families of RULER but in our own words: `ruler-like`, no RULER scores.

A carrier is the text that an answer must be read from; its place in the prompt is known to the character.  Seeded per sample,
so that no position is preferred.  Imports no torch.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from harness.errors import UserError
from harness.haystack import NOISE, Haystack
from harness.presets import nearest

SUITE = "ruler-like-1"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    "amber brisk copper dusty eager faded gentle hollow icy jolly keen lunar mellow narrow olive plain quiet rusty"
)
NOUNS = _words(
    "anchor basket canyon drum engine feather garden helmet island jacket kettle ladder meadow needle orchard pillow"
)
CITIES = _words("Arvole Benstad Corlin Dremt Elvira Fostan Gimle Harrow Istel Jorvik Kelda Lorne")
TRADES = _words("baker carpenter dentist farmer glazier jeweller mason painter sailor tailor")


@dataclass(frozen=True)
class Prompt:
    """context, question   what the user writes, in this order
    opening             how the assistant's answer begins, before the first of `answers`
    answers             the texts that the answer consists of, in order
    carriers            one span (start, end) in `context` per answer; empty where no single place holds it
    depth               where the first carrier lies, 0 to 1
    """

    task: str
    seed: int
    context: str
    question: str
    opening: str
    answers: tuple[str, ...]
    carriers: tuple[tuple[int, int], ...]

    @property
    def response(self) -> str:
        return self.opening + ", ".join(self.answers) + "."

    @property
    def depth(self) -> float | None:
        return self.carriers[0][0] / len(self.context) if self.carriers else None


@dataclass
class _Page:
    """Sentences with needles among them, and where the answers' texts come to lie."""

    rng: random.Random
    lines: list[str]
    needles: list[tuple[str, str | None]] = field(default_factory=list)  # sentence, and the answer that it carries

    def text(self, ordered: bool = False) -> tuple[str, dict[str, tuple[int, int]]]:
        places = [self.rng.randrange(len(self.lines) + 1) for _ in self.needles]
        order = sorted(places) if ordered else places
        ranked = sorted(zip(order, range(len(order)), strict=True))
        parts: list[str] = []
        spans: dict[str, tuple[int, int]] = {}
        at, following = 0, iter([*ranked, (-1, -1)])
        place, which = next(following)
        for index in range(len(self.lines) + 1):
            while place == index:
                sentence, answer = self.needles[which]
                if answer is not None:
                    start = at + sentence.rindex(answer)
                    spans[answer] = (start, start + len(answer))
                parts.append(sentence)
                at += len(sentence) + 1
                place, which = next(following)
            if index < len(self.lines):
                parts.append(self.lines[index])
                at += len(self.lines[index]) + 1
        return " ".join(parts), spans


def _prose(rng: random.Random, haystack: Haystack, items: int) -> list[str]:
    """`items` sentences in a row from anywhere, from the start again where the text ends."""
    start = rng.randrange(len(haystack.sentences))
    return [haystack.sentences[(start + i) % len(haystack.sentences)] for i in range(items)]


def _noise(rng: random.Random, haystack: Haystack, items: int) -> list[str]:
    return [NOISE[i % len(NOISE)] for i in range(items)]


def _key(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} {rng.randrange(10, 1000)}"


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10**6, 10**7))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _coded(rng: random.Random) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(6))


def _distinct(make: Callable[[random.Random], str], rng: random.Random, count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[make(rng)] = None
    return list(found)


def _needle(key: str, value: str) -> str:
    return f"Please note: the access code of the {key} is {value}."


def _shifted(spans: Iterable[tuple[int, int]], by: int) -> tuple[tuple[int, int], ...]:
    return tuple((start + by, end + by) for start, end in spans)


def _niah(
    lines: Callable[[random.Random, Haystack, int], list[str]] | None,
    value: Callable[[random.Random], str] = _number,
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    key: Callable[[random.Random], str] = _key,
) -> Callable[[str, random.Random, Haystack, int], Prompt]:
    """lines None: the haystack is made of needles, which are distractors."""

    def build(task: str, rng: random.Random, haystack: Haystack, items: int) -> Prompt:
        count = max(keys, queries)
        names = _distinct(key, rng, count + (items if lines is None else 0))
        codes = _distinct(value, rng, count * values + (items if lines is None else 0))
        body = (
            lines(rng, haystack, items)
            if lines
            else [_needle(name, code) for name, code in zip(names[count:], codes[count * values :], strict=True)]
        )
        asked = names[:queries]
        wanted = codes[: queries * values]
        needles = [
            (_needle(names[i // values], code), code if code in wanted else None)
            for i, code in enumerate(codes[: count * values])
        ]
        context, spans = _Page(rng, body, needles).text()
        plural = "s" if len(wanted) > 1 else ""
        of = " and the ".join(asked)
        head = "Some access codes are hidden in the following text. Remember them.\n\n"
        return Prompt(
            task,
            0,
            head + context,
            f"\n\nWhich access code{plural} of the {of} does the text mention?",
            f"The access code{plural} of the {of} mentioned in the text: ",
            tuple(wanted),
            _shifted((spans[code] for code in wanted), len(head)),
        )

    return build


def _chain(task: str, rng: random.Random, haystack: Haystack, items: int) -> Prompt:
    """Variables that are set from one another."""
    names = _distinct(lambda r: "".join(r.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(5)), rng, 5)
    number = str(rng.randrange(10_000, 100_000))
    sources = [number, *names]
    needles: list[tuple[str, str | None]] = [
        (f"Set the variable {b} equal to {a}, so {b}.", b) for a, b in zip(sources[:-1], names, strict=True)
    ]
    context, spans = _Page(rng, _noise(rng, haystack, items), needles).text(ordered=True)
    head = "Variables are set somewhere in the following text. Keep track of them.\n\n"
    return Prompt(
        task,
        0,
        head + context,
        f"\n\nWhich variables have the value {number}, directly or through other variables?",
        f"These variables have the value {number}: ",
        tuple(names),
        _shifted((spans[name] for name in names), len(head)),
    )


def _common_words(task: str, rng: random.Random, haystack: Haystack, items: int) -> Prompt:
    """A list in which ten words come up far more often than the others."""
    common_times, times = (30, 3) if items >= 400 else (6, 1)
    others = max(1, (items - 10 * common_times) // times)
    words = rng.sample(haystack.words, min(len(haystack.words), 10 + others))
    words += _distinct(_coded, rng, 10 + others - len(words))  # where the haystack has too few
    shuffled = words[:10] * common_times + words[10:] * times
    rng.shuffle(shuffled)
    context = "Here is a list of words.\n\n" + " ".join(f"{i + 1}. {word}" for i, word in enumerate(shuffled))
    question = "\n\nWhich ten words are the most common ones in the list?"
    return Prompt(task, 0, context, question, "The most common words in the list: ", tuple(words[:10]), ())


def _frequent_words(task: str, rng: random.Random, haystack: Haystack, items: int) -> Prompt:
    """Made-up words whose frequencies fall with the square of their rank; the first one is dots."""
    words = _distinct(_coded, rng, max(5, items // 10))
    words[0] = "......"
    text = [word for rank, word in enumerate(words, 1) for _ in range(max(1, int(items / rank**2 / 1.645)))]
    rng.shuffle(text)
    context = "A coded text follows. Its dots are not words.\n\n" + " ".join(text)
    question = "\n\nWhich three coded words are the most frequent ones?"
    return Prompt(task, 0, context, question, "The most frequent coded words: ", tuple(words[1:4]), ())


def _documents(task: str, rng: random.Random, haystack: Haystack, items: int) -> Prompt:
    """Short made-up biographies; one is asked for."""
    people = _distinct(
        lambda r: f"{r.choice(CITIES)[:3]}{r.choice(NOUNS)[:4]} {r.choice(ADJECTIVES).title()}son".title(),
        rng,
        2 + items // 3 % 150,
    )
    rows = [(name, rng.choice(TRADES), rng.choice(CITIES), _number(rng)) for name in people]
    asked = rng.randrange(len(rows))
    parts, span, at = [], (0, 0), 0
    filler = _prose(rng, haystack, items)
    for i, (name, trade, city, licence) in enumerate(rows):
        body = " ".join(filler[i :: len(rows)])
        parts.append(f"Document {i + 1}: {name} is a {trade} from {city} and holds licence {licence}. {body}\n")
        if i == asked:
            start = at + parts[-1].index(licence)
            span = (start, start + len(licence))
        at += len(parts[-1])
    head = "Answer from the following documents.\n\n"
    name, _, _, licence = rows[asked]
    question = f"\n\nWhich licence does {name} hold?"
    return Prompt(task, 0, head + "".join(parts), question, f"{name} holds licence ", (licence,), _shifted([span], len(head)))


TASKS: dict[str, Callable[[str, random.Random, Haystack, int], Prompt]] = {
    "niah_single_1": _niah(_noise),
    "niah_single_2": _niah(_prose),
    "niah_single_3": _niah(_prose, value=_uuid),
    "niah_multikey_1": _niah(_prose, keys=4),
    "niah_multikey_2": _niah(None),
    "niah_multikey_3": _niah(None, value=_uuid, key=_uuid),
    "niah_multivalue": _niah(_prose, values=4),
    "niah_multiquery": _niah(_prose, queries=4),
    "vt": _chain,
    "cwe": _common_words,
    "fwe": _frequent_words,
    "qa_synth": _documents,
}


def tasks(wanted: Iterable[str]) -> list[str]:
    """Names as given, or all for "all"; UserError with the nearest name for an unknown one."""
    chosen: list[str] = []
    for name in wanted:
        if name != "all" and name not in TASKS:
            raise UserError(f"unknown task {name!r}; {nearest(name, TASKS)}")
        chosen += TASKS if name == "all" else [name]
    return list(dict.fromkeys(chosen))


def fill(task: str, seed: int, haystack: Haystack, fits: Callable[[Prompt], bool]) -> Prompt:
    """The longest prompt of a task and seed that `fits`: the same sample grows until it does not.  UserError if none fits."""

    def build(items: int) -> Prompt:
        return replace(TASKS[task](task, random.Random(f"{task} {seed}"), haystack, items), seed=seed)

    low, high = 0, 16
    while fits(build(high)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(build(middle)) else (low, middle)
    if low == 0:
        raise UserError(f"the context is too short for task {task}; use a longer --ctx")
    return build(low)
