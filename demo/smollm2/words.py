"""Names, places and things that the examples are about, each in one half: training or held out."""

import random
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


class Choice:
    """Random choices in one half: of a list, every fourth item is held out."""

    def __init__(self, seed: str, *, held_out: bool) -> None:
        self.random = random.Random(seed)
        self.held_out = held_out

    def word(self, pool: Sequence[Item]) -> Item:
        """One item of this half."""
        return self.random.choice([item for index, item in enumerate(pool) if (index % 4 == 3) is self.held_out])

    def words(self, pool: Sequence[Item], count: int) -> list[Item]:
        """Different items of this half."""
        return self.random.sample([item for index, item in enumerate(pool) if (index % 4 == 3) is self.held_out], count)

    def any(self, pool: Sequence[Item]) -> Item:
        """One item of both halves: templates, and words that every text may have."""
        return self.random.choice(pool)

    def number(self, lowest: int, highest: int) -> int:
        """An integer between two bounds, both included; one in four numbers is held out."""
        while True:
            value = self.random.randint(lowest, highest)
            if (value % 4 == 3) is self.held_out or highest - lowest < 8:
                return value


FIRST = _split(
    """Anna Ben Carla Oskar Dina Emil Fatima Lars Greta Hugo Ines Mona Jonas Kira Leo Petra Marta Nils Olga Rosa Paul
    Rita Sven Tarek Ute Viktor Wanda Yusuf Zoe Alma Bruno Clara David Elsa Felix Nora Georg Hana Ivan Sofia Jana Karl
    Lena Tomas Miriam Noah Otto Vera"""
)
LAST = _split(
    """Keller Moreno Novak Aydin Lindgren Costa Fischer Okoro Petrov Rossi Sato Dubois Hansen Iqbal Jensen Kowalski
    Larsen Mendes Nagy Osman Peters Quinn Reyes Schmidt Tanaka Usman Vogel Weber Yilmaz Zhang Bauer Carter Dahl Evans
    Fuchs Gruber"""
)
CITIES = _split(
    """Oslo Lisbon Vienna Ghent Lyon Turin Porto Krakow Bergen Graz Malmo Basel Leeds Cork Bilbao Tallinn Riga Zagreb
    Split Nantes Toledo Parma Bruges Tampere"""
)
JOBS = _split(
    """nurse baker teacher plumber pilot gardener lawyer welder dentist librarian chef carpenter painter farmer
    violinist translator"""
)
DAYS = _split("""Monday Tuesday Wednesday Thursday Friday Saturday Sunday""")
ITEMS = _split(
    """lamp chair kettle tent backpack blanket mirror drill bicycle suitcase pillow printer keyboard clock vase
    bucket ladder jacket helmet notebook umbrella speaker camera teapot"""
)
COLOURS = _split("""red blue green black white grey yellow brown""")
TOPICS = _split(
    """budget hiring roadmap safety marketing onboarding renovation warehouse website training logistics payroll
    catering insurance packaging recycling"""
)
PLACES = [
    "museum", "library", "bakery", "swimming pool", "city garden", "post office", "town hall", "cinema", "bookshop",
    "castle", "harbour", "zoo", "chapel", "theatre", "market hall", "concert hall", "observatory", "aquarium",
    "gallery", "railway station",
]  # fmt: skip
