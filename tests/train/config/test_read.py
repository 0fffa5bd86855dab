import dataclasses
import enum
from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_dist.core.arguments import ArgumentKind
from axon_dist.core.errors import ConfigError
from axon_dist.train.config import RunConfig
from axon_dist.train.config.read import (
    Count,
    Fraction,
    NonNegative,
    OneOf,
    Parsed,
    Positive,
    read,
    write,
)


class Color(enum.Enum):
    RED = 1
    DARK_BLUE = 2


@dataclasses.dataclass(frozen=True)
class Cat:
    lives: Count = 9


@dataclasses.dataclass(frozen=True)
class Dog:
    size: Positive = 1.0
    tricks: tuple[str, ...] = ()

    def validate(self):
        if len(self.tricks) > self.size:
            raise ConfigError(f"tricks={self.tricks} are too many for size={self.size}")


PETS = {"cat": Cat, "dog": Dog}
PRESETS = {"dog": {"poodle": {"size": 2.0, "tricks": ["sit"]}}}


@dataclasses.dataclass(frozen=True)
class House:
    rooms: Count
    pet: Annotated[object, OneOf(PETS, tag="kind", presets=PRESETS)] = Cat()
    pets: tuple[Annotated[object, OneOf(PETS, tag="kind")], ...] = ()
    garden: bool = False
    warmth: float | None = None
    side: Literal["left", "right"] = "left"
    point: Annotated[complex, Parsed(complex, str, "a complex number")] = 0j


def test_every_kind_of_value():
    house = read(
        House,
        {
            "rooms": 3,
            "pet": {"kind": "dog", "size": 2},
            "pets": ["cat", {"kind": "cat", "lives": 1}],
            "garden": True,
            "warmth": "2e1",
            "side": "right",
            "point": "1j",
        },
    )
    assert house == House(3, Dog(2.0), (Cat(), Cat(1)), True, 20.0, "right", 1j)
    assert isinstance(house.pet.size, float)


def test_the_first_row_is_the_default_and_presets_are_overridden():
    assert read(House, {"rooms": 1, "pet": {"lives": 2}}).pet == Cat(2)
    assert read(House, {"rooms": 1, "pet": None}).pet == Cat()
    poodle = read(House, {"rooms": 1, "pet": {"kind": "dog", "preset": "poodle", "size": 3}}).pet
    assert poodle == Dog(3.0, ("sit",))


@pytest.mark.parametrize(
    ("value", "expected"),
    [({"lives": 3}, Cat(3)), ("red", Color.RED), ("stray", "stray"), (None, None)],
)
def test_unions_take_the_first_that_fits(value, expected):
    assert read(Cat | Color | str | None, value) == expected


def test_unions_complain_about_the_part_that_was_meant():
    with pytest.raises(ConfigError, match=r"^x.live: there is no such key. Did you mean 'lives'"):
        read(Cat | str | None, {"live": 3}, "x")
    with pytest.raises(ConfigError, match=r"^x: got 3, which must be a string"):
        read(Cat | str | None, 3, "x")


def test_a_key_that_is_a_level_too_high():
    with pytest.raises(ConfigError, match=r"Did you mean 'optimizer.learning_rate'\? Valid: axis"):
        RunConfig.from_dict({"learning_rate": 0.1})
    with pytest.raises(ConfigError, match=r"Did you mean 'train.steps'\? Valid: "):
        RunConfig.from_dict({"steps": 3})


def test_options_that_only_python_can_set_are_refused():
    with pytest.raises(ConfigError, match=r"^x: got 3, but only Python can set this; leave"):
        read(object, 3, "x")


def test_dtypes_and_enums_are_written_by_name():
    assert write([]) == []
    assert write({"a": np.dtype("float32"), "b": Color.DARK_BLUE}) == {
        "a": "float32",
        "b": "dark_blue",
    }


def test_enums_and_mappings():
    assert read(Color, "dark_blue") is Color.DARK_BLUE
    assert dict(read(Mapping[str, Count], {"a": 1})) == {"a": 1}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, r"^rooms: missing, and it has no default; set it"),
        ({"rooms": 0}, r"^rooms: got 0, which must be a whole number, at least 1"),
        ({"rooms": "3"}, r"^rooms: got '3', which must be a whole number"),
        ({"rooms": True}, r"^rooms: got True, which must be a whole number"),
        ({"rooms": 2.0}, r"^rooms: got 2.0, which must be a whole number"),
        ({"rooms": 1, "roms": 2}, r"^roms: there is no such key. Did you mean 'rooms'\? Valid: "),
        ({"rooms": 1, "garden": 1}, r"^garden: got 1, which must be true or false"),
        ({"rooms": 1, "warmth": "hot"}, r"^warmth: got 'hot', which must be a number"),
        ({"rooms": 1, "warmth": True}, r"^warmth: got True, which must be a number"),
        ({"rooms": 1, "side": "lift"}, r"^side: there is no 'lift'. Did you mean 'left'\?"),
        ({"rooms": 1, "pet": {"kind": "dig"}}, r"^pet.kind: there is no 'dig'. Did you mean 'dog'"),
        (
            {"rooms": 1, "pet": {"kind": "cat", "size": 1}},
            r"^pet.size: there is no such key. Valid",
        ),
        ({"rooms": 1, "pet": {"kind": "dog", "preset": "pudel"}}, r"^pet.preset: .* 'poodle'"),
        ({"rooms": 1, "pet": {"kind": "cat", "preset": "x"}}, r"^pet.preset: there is no such key"),
        ({"rooms": 1, "pet": 3}, r"^pet: got 3, which must be a section"),
        (
            {"rooms": 1, "pets": [{"lives": 0}]},
            r"^pets\[0\].lives: got 0, which must be a whole number, at least 1",
        ),
        ({"rooms": 1, "pets": 3}, r"^pets: got 3, which must be a list"),
        (
            {"rooms": 1, "pet": {"kind": "dog", "tricks": ["sit", "roll"]}},
            r"^pet: tricks=\('sit', 'roll'\) are too many for size=1.0",
        ),
        ({"rooms": 1, "point": "here"}, r"^point: complex\(\) arg is a malformed string"),
        ([1], r"got \[1\], which must be a section of keys and values"),
    ],
)
def test_mistakes_name_the_key_what_was_got_and_what_is_valid(data, message):
    with pytest.raises(ConfigError, match=message):
        read(House, data)


def test_an_error_that_names_the_key_itself_is_not_prefixed_twice():
    @dataclasses.dataclass(frozen=True)
    class Data:
        files: int = 0

        def validate(self):
            raise ConfigError("data.files: missing")

    with pytest.raises(ConfigError, match=r"^data\.files: missing"):
        read(Data, {}, "data")


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (Positive, 0.0),
        (Positive, float("inf")),
        (Positive, float("nan")),
        (NonNegative, -1.0),
        (Fraction, 1.0),
        (Fraction, -0.1),
        (Annotated[int, ArgumentKind("odd", lambda v: v % 2)], 2),
    ],
)
def test_bounds(hint, value):
    with pytest.raises(ConfigError, match=r"x: got .*, which must be"):
        read(hint, value, "x")


PET = st.one_of(st.builds(Cat, lives=st.integers(1, 99)), st.builds(Dog, size=st.floats(0.5, 1e6)))
HOUSE = st.builds(
    House,
    rooms=st.integers(1, 99),
    pet=PET,
    pets=st.lists(PET).map(tuple),
    garden=st.booleans(),
    warmth=st.none() | st.floats(allow_nan=False),
    side=st.sampled_from(["left", "right"]),
    point=st.complex_numbers(allow_nan=False),
)


@settings(deadline=None)
@given(HOUSE)
def test_write_is_undone_by_read(house):
    assert read(House, write(house)) == house
