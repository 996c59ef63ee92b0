"""Invented names, numbers and nouns, each in one half.

Names are made of syllables and practically never repeat, so a model cannot memorize them and must copy.
"""

import random
from functools import cache

from lorikeet.demo.data.tasks.example import Half, half_of


def split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ONSETS = split("b d f g h j k l m n p r s t v w b d f g k l m n p r s t v z br ch cl dr fl gr kr pl sh st th tr")
VOWELS = split("a e i o u a e i o u a e i o u ai ee ou")
CODAS = split("l m n r s t d k x nd rk st") + ("",) * 12

NOUNS = split(
    """account alarm anchor apple archive arrow axle badge barrel basket battery bell bench bicycle blanket boat bolt
    book bottle box bridge bucket button cabin cable camera candle canvas carpet cart chain chair chart chest circle
    clock cloth coat coin column compass copper cord corner cotton counter crane crate crystal cup curtain cushion
    desk device dish door drawer drill drum engine envelope fabric fan feather fence fiber field filter flag flask
    floor flute folder fork frame fruit fuel funnel garden gate gear gift glass glove grain granite guitar hammer
    handle harbor hat helmet hinge hook horn hose house icon invoice iron island jacket jar jewel journal kettle key
    kite knife label ladder lamp lantern leather ledger lens letter lever library lid lock loom machine magnet
    mantle map marble market mask medal meter mill mirror mixer module motor nail needle net notebook oar orange
    orchard organ oven package paddle paint palette panel paper parcel pedal pen pencil pepper piano picture pillow
    pin pipe piston plank plate plow pocket pole portrait poster pot powder press printer pulley pump quilt rack
    radio rail ramp ribbon ring river robe rocket rod roof rope rudder ruler sack saddle sail salt sample scale
    scarf screen screw seal seat sensor shaft sheet shelf shell shield ship shirt shovel signal silk silver sink
    slate sled socket sofa spade spindle spoon spring stamp statue steel stone stool stove strap string switch table
    tank tape target tent thread ticket tile timber tire token tool torch tower tractor trail tray tripod truck
    trumpet trunk tube tunnel turbine umbrella valve vase vault vehicle vessel violin wagon wallet water wheel
    whistle window wire wood wool wrench yarn"""
)

FIELDS = split(
    """name age city price color size status email phone street country title author year month weight height width
    length depth speed score rank level grade count amount total balance salary rate owner teacher student doctor
    driver pilot captain manager customer supplier shop school office village region language currency brand model
    version category team league species breed origin target source reason result summary note comment code
    serial batch shift floor room seat gate platform track route distance duration start finish budget profit tax
    discount rating votes views likes pages chapters words lines"""
)


def name(half: Half, choice: random.Random) -> str:
    """Two or three syllables in lower case."""
    while True:
        word = "".join(_syllable(choice) for _ in range(choice.choice((2, 2, 3))))
        if word not in NOUNS and half_of(word) is half:
            return word


def proper_name(half: Half, choice: random.Random) -> str:
    """Like `name`, capitalized; the half does not depend on the capital."""
    return name(half, choice).capitalize()


def noun(half: Half, choice: random.Random) -> str:
    return choice.choice(_real_words(half)[0])


def plural(word: str) -> str:
    if word.endswith("y") and word[-2] not in "aeo":
        return f"{word[:-1]}ies"
    return f"{word}es" if word.endswith(("s", "x", "ch", "sh")) else f"{word}s"


def field(half: Half, choice: random.Random) -> str:
    """A name for a column or key: a common one, any noun, an invented one, or two joined."""
    kind = choice.random()
    if kind < 0.35:
        return choice.choice(_real_words(half)[1])
    if kind < 0.6:
        return noun(half, choice)
    if kind < 0.75:
        return name(half, choice)
    while True:
        joined = f"{noun(half, choice)}_{choice.choice(_real_words(half)[1])}"
        if half_of(joined) is half:
            return joined


@cache
def _real_words(half: Half) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Nouns and fields."""
    nouns, fields = ([word for word in dict.fromkeys(pool) if half_of(word) is half] for pool in (NOUNS, FIELDS))
    return tuple(nouns), tuple(fields)


def number(half: Half, choice: random.Random, lowest: int = 2, highest: int = 999) -> int:
    while True:
        value = choice.randint(lowest, highest)
        if half_of(str(value)) is half:
            return value


def _syllable(choice: random.Random) -> str:
    return choice.choice(ONSETS) + choice.choice(VOWELS) + choice.choice(CODAS)
