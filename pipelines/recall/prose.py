"""Text for haystacks: invented sentences, and names to hide.

No key and no value is a word of the sentences, so each occurs once in a haystack. The texts decide the questions:
changing one changes every result.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

#: Words before a key, the same in every needle of a haystack.
WORDINGS = ("A letter came for", "Remember the name", "The guest was", "They spoke of")

KEYS = tuple(
    "Adam Alice Andrew Anna Arthur Charles Clara David Edward Elena Emma Eric Frank Fred George Grace Helen Henry Hugo "
    "Ivan Jack James Jane Julia Karl Kate Laura Leo Lisa Louis Lucy Maria Martin Max Nina Oliver Oscar Paul Peter "
    "Robert Rosa Ruth Sam Sarah Simon Thomas Victor Walter".split()
)

VALUES = tuple(
    "Archer Banks Baxter Berry Bishop Black Brooks Brown Carter Castle Chase Church Cook Cooper Cross Dean Field "
    "Fisher Ford Fox Green Hall Hill Hood House Hunt Hunter Judge King Knight Lake Lane Law Lynch Long Major Marsh "
    "Moon Page Park Pierce Pool Power Price Reed Rice Rivers Rock Rose Sharp Singer Small Star Stone Street Summer "
    "Swift Taylor Temple Wall Waters West White Winter Wolf Wood Woods Young".split()
)

_PEOPLE = (
    "baker barber beekeeper boatman bricklayer butcher carpenter clerk dancer dentist driver farmer gardener glazier "
    "janitor librarian mechanic messenger miller musician nurse painter pilot plumber poet porter potter sailor "
    "sculptor shepherd tailor teacher watchmaker weaver"
).split()
_THINGS = (
    "apron basket bell bicycle blanket bottle broom bucket button candle carpet chair clock coat compass cup drum "
    "envelope fiddle flag funnel hammer hat jar kettle ladder lamp map mirror needle notebook oar pillow pipe plate "
    "ribbon rope saddle scarf shovel spoon suitcase ticket towel trumpet umbrella vase wheel"
).split()
_PLACES = (
    "attic bakery balcony barn bridge canal cellar courtyard dairy factory fountain garage gate greenhouse harbour inn "
    "kitchen laundry library lighthouse market meadow mill museum orchard pharmacy pier quarry school shed stable "
    "station terrace theatre tower tunnel vineyard windmill workshop"
).split()

_TEMPLATES = (
    "The {person} carried the {thing} to the {place} before noon.",
    "Nobody at the {place} knew why the {person} wanted another {thing}.",
    "In the evening the {person} left a {thing} near the {place}.",
    "A {thing} had been lying in the {place} since the {person} moved away.",
    "When the rain stopped, the {person} mended the {thing} behind the {place}.",
    "The {thing} from the {place} was heavier than the {person} had thought.",
    "Every Monday the {person} walks past the {place} with a {thing}.",
    "It took the {person} an hour to find the {thing} in the {place}.",
    "Somebody painted the {thing} blue and showed it to the {person} at the {place}.",
    "The {person} promised to bring the {thing} back to the {place}.",
    "Beside the {place} the {person} sold a {thing} for very little money.",
    "The {person} never trusted the old {thing} that hung in the {place}.",
    "There was room for one more {thing} in the {place}, said the {person}.",
    "At dawn the {place} was empty, and the {person} had forgotten the {thing}.",
    "The {person} swapped a {thing} for a ride to the {place}.",
    "Children from the {place} borrowed the {thing} that belonged to the {person}.",
    "The {person} slept badly because the {thing} in the {place} rattled.",
    "Two days later the {thing} turned up under the {place}, to the joy of the {person}.",
    "The {person} wrote a short note about the {thing} and pinned it to the {place}.",
    "With a sigh the {person} put the {thing} down and looked at the {place}.",
    "The {place} smelled of soap after the {person} had washed the {thing}.",
    "A cousin of the {person} keeps a {thing} like this in the {place}.",
    "The {thing} broke, so the {person} went home by way of the {place}.",
    "On the road to the {place} the {person} dropped the {thing} twice.",
    "The {person} would rather lose the {thing} than sell the {place}.",
    "From the {place} one could hear the {person} beating on a {thing}.",
    "Last year the {person} built a {place} and had no {thing} left.",
    "The {person} laughed when the {thing} rolled out of the {place}.",
    "The door of the {place} was shut, so the {person} sat on the {thing}.",
    "Without the {thing} the {person} did not dare to enter the {place}.",
    "The {person} counted the steps to the {place} and tapped the {thing} at each.",
    "The wind blew the {thing} off the {place} while the {person} was eating.",
    "Neither the {person} nor the neighbours had seen a {thing} at the {place}.",
    "For the {person}, the {place} without a {thing} was only half a home.",
    "The {person} hid behind the {place} and held the {thing} very still.",
    "After lunch the {thing} was taken from the {person} and locked in the {place}.",
    "An advertisement for the {thing} made the {person} travel to the {place}.",
    "The {person} tied the {thing} to the roof of the {place} with a piece of string.",
    "The {person} learned at the {place} how to clean a {thing} with sand.",
    "It was the {person} who opened the {place} and lent everybody a {thing}.",
)


def sentences(rng: Random) -> Iterator[str]:
    """Yield random sentences forever, each of 2.5 million at most once."""
    seen: set[str] = set()
    while True:
        sentence = rng.choice(_TEMPLATES).format(
            person=rng.choice(_PEOPLE), thing=rng.choice(_THINGS), place=rng.choice(_PLACES)
        )
        if sentence not in seen:
            seen.add(sentence)
            yield sentence
