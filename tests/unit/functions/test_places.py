"""Locations of hotels, and hotels read from files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from functions.travel import hotels
from functions.travel.hotels import HotelDataError, generated_hotels, read_hotels
from functions.travel.places import distance_km, nearest


@pytest.mark.parametrize(
    ("one", "other", "km"),
    [
        ((37.7749, -122.4194), (34.0522, -118.2437), 559),  # San Francisco, Los Angeles
        ((52.5200, 13.4050), (-33.8688, 151.2093), 16_094),  # Berlin, Sydney
        ((0.0, 179.5), (0.0, -179.5), 111),  # over the date line
        ((10.0, 20.0), (10.0, 20.0), 0),
    ],
)
def test_distances_agree_with_an_atlas(
    one: tuple[float, float], other: tuple[float, float], km: float
) -> None:
    assert distance_km(one, other) == pytest.approx(km, rel=0.005, abs=0.01)


@pytest.mark.parametrize("seed", range(20))
def test_a_search_returns_at_most_five_hotels_within_ten_kilometres_nearest_first(
    seed: int,
) -> None:
    choose = random.Random(seed)
    places = {
        str(n): (choose.uniform(37.6, 37.9), choose.uniform(-122.6, -122.3)) for n in range(40)
    }
    here = (37.7, -122.4)
    found = nearest(places, here)
    away = sorted((distance_km(place, here), hotel) for hotel, place in places.items())
    assert found == [hotel for km, hotel in away if km <= 10][:5]


def test_generated_hotels_are_determined_by_the_seed() -> None:
    assert generated_hotels(seed=3) == generated_hotels(seed=3) != generated_hotels(seed=4)
    assert len({hotel.id for hotel in generated_hotels()}) == hotels.HOTELS


def written(directory: Path, **files: object) -> Path:
    there: dict[str, object] = {
        "hotels": [{"id": "7", "name": "Clift", "address": {"streetName": "Geary St"}}],
        "geo": [{"hotelId": "7", "lat": 37.5, "lon": -122.5}],
        "inventory": [{"hotelId": "7", "code": "x", "roomType": {"bookableRate": 109.0}}],
    }
    for name, value in (there | files).items():
        text = value if isinstance(value, str) else json.dumps(value)
        (directory / f"{name}.json").write_text(text)
    return directory


def test_hotels_from_a_file_are_completed_with_generated_ones(tmp_path: Path) -> None:
    found = read_hotels(written(tmp_path), count=9)
    first = found[0]
    assert (first.id, first.name, first.address) == ("7", "Clift", "Geary St")
    assert (first.lat, first.lon, first.price) == (37.5, -122.5, 109.0)
    assert sorted(hotel.id for hotel in found) == [str(n) for n in range(1, 10)]


def test_more_hotels_than_requested_are_all_used(tmp_path: Path) -> None:
    assert [hotel.id for hotel in read_hotels(written(tmp_path), count=0)] == ["7"]


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"geo": []}, "does not say where hotel 7 is"),
        ({"hotels": [{"name": "x"}]}, "hotels.json is not as expected: .*`id`"),
        ({"inventory": "{"}, "inventory.json is not as expected"),
        ({"geo": [{"hotelId": "7", "lat": 91, "lon": 0}]}, "geo.json is not as expected"),
    ],
)
def test_a_malformed_file_is_refused_in_one_sentence(
    tmp_path: Path, files: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(HotelDataError, match=sentence) as caught:
        read_hotels(written(tmp_path, **files))
    assert "\n" not in str(caught.value)


def test_a_directory_without_hotels_is_refused_in_one_sentence_with_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["hotels", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        hotels.main()
    output = capsys.readouterr().err
    assert output == f"{tmp_path}/hotels.json cannot be read: No such file or directory.\n"
