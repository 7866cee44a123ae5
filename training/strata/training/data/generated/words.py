"""Words of the generated tasks: English nouns of three to five letters, names, cities, and words that do not exist.

A small model memorizes a list of a few hundred words instead of learning to copy from the prompt. So most words are invented:
one of 450 syllables, which occur in all tasks.
"""

from random import Random

_NOUNS = """
ant apple arm army axe baby bag ball band bank barn bath beach bean bear beard bed bee bell belt bench berry bird block boat
body bone book boot bowl box boy brain bread brick broom brush bug bull bus bush cake camel camp cap car card cart cat cave
chain chair cheek chest chick child city class clock cloud club coat coin comb cook copy corn couch cow crab crane cream creek
crow crown cup curve daisy dance day deer dish dog doll door dream dress drum duck eagle ear egg eye face fairy farm feast fence
ferry field fire fish flag flame floor fly foot fork fox frame frog fruit game gate ghost giant gift girl glass glove goat goose
grape grass hall hand hat hawk hen hero hill hobby hook horn horse hotel house idea jar jelly jewel judge juice key king kite
knee knife lady lake lamp leaf leg lemon lily lion lip list lock loaf log lunch man map mask match meal melon month moon mouse
mouth nail nest net night nose nurse oak ocean onion oven owl page paint palm paper park party pear pen penny piano pig pilot
pin pipe plane plant plate poem pond pony pot puppy queen radio rail ring river road robot rock roof rope rose ruler sail salad
sand sea seat seed shelf ship shirt shoe shop skirt sky snail snake sock spoon spy stamp star step stick stone store storm story
stove sun swan table tail tent tiger toad tooth tower town toy train tray tree truck tube uncle van vase wagon wall watch water
wave wheel whip wing wish witch wolf woman wood world worm wrist yard year zebra
"""
_NAMES = """
Ada Adam Alma Amir Ana Anton Bea Ben Boris Carla Chen Clara Dana David Diego Ella Elsa Emil Eva Felix Fumi Gina Hana Hugo Ida
Igor Ines Ivan Jan Jonas Juan Kai Karim Kira Lara Leo Lina Luca Maja Marco Maria Max Mei Mila Mona Nadia Nico Nina Noah Nora
Olga Omar Otto Paul Petra Raj Rita Rosa Ruth Sam Sara Sofia Sven Tara Theo Tim Tina Tom Uma Vera Victor Yara Yuki Zoe
"""
_CITIES = """
Accra Amman Athens Bergen Berlin Bern Bogota Boston Bremen Cairo Cork Dakar Delhi Denver Dublin Genoa Graz Hanoi Havana Kyoto
Lagos Lima Lisbon London Lyon Madrid Malmo Manila Miami Milan Munich Nairobi Naples Osaka Oslo Paris Porto Prague Quito Riga
Rome Seoul Sofia Sydney Tokyo Turin Tunis Vienna Warsaw Zagreb Zurich
"""
NOUNS = tuple(_NOUNS.split())
NAMES = tuple(_NAMES.split())
CITIES = tuple(_CITIES.split())
SYLLABLE = ("bdfghjlmnprstvw", "aeiou", "bdlmnr")  # first letter, vowel, last letter
INVENTED = 0.75  # share of the words that do not exist
IRREGULAR = {
    "child": "children",
    "deer": "deer",
    "fish": "fish",
    "foot": "feet",
    "goose": "geese",
    "hero": "heroes",
    "knife": "knives",
    "leaf": "leaves",
    "loaf": "loaves",
    "man": "men",
    "mouse": "mice",
    "shelf": "shelves",
    "tooth": "teeth",
    "wolf": "wolves",
    "woman": "women",
}


def plural(noun: str) -> str:
    if noun in IRREGULAR:
        return IRREGULAR[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"


def invented(random: Random) -> str:
    return "".join(random.choice(letters) for letters in SYLLABLE)


def words(random: Random, count: int) -> list[str]:
    """Different words in small letters."""
    return _different(random, NOUNS, count)


def names(random: Random, count: int) -> list[str]:
    return [name.capitalize() for name in _different(random, NAMES, count)]


def cities(random: Random, count: int) -> list[str]:
    return [city.capitalize() for city in _different(random, CITIES, count)]


def _different(random: Random, known: tuple[str, ...], count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        word = invented(random) if random.random() < INVENTED else random.choice(known)
        if word not in found:
            found.append(word)
    return found
