"""The hotels of the demo: generated, or read from a directory.

The directory has `hotels.json` (`id`, `name`, `phoneNumber`, `address`), `geo.json` (`hotelId`,
`lat`, `lon`) and `inventory.json` (`hotelId`, `roomType.bookableRate`), as in the hotel reservation
of DeathStarBench. `python -m functions.travel.hotels DIR` checks a directory and starts nothing.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

HOTELS: Final = 100
LISTED: Final = 80
"""Number of hotels on the map (WORKLOADS 4)."""
CENTRE: Final = (37.7867, -122.4112)
_SPREAD_DEGREES: Final = 0.1
"""Spread of the hotels around the city: about ten kilometres."""
_FILE_BYTES_MAX: Final = 16 * 1024 * 1024
_FIRST: Final = ("Harbour", "Garden", "Station", "Castle", "River", "Market", "Park", "Hill")
_SECOND: Final = ("Inn", "House", "Court", "Lodge", "Palace", "Rooms")


class HotelDataError(Exception):
    """The directory has no valid hotels; the message says why in one sentence."""


class Known(msgspec.Struct, frozen=True):
    """The data of a hotel before it is loaded."""

    id: str
    name: str
    lat: float
    lon: float
    rating: float
    price: float
    phone: str = ""
    address: str = ""


class _Address(msgspec.Struct, frozen=True):
    streetNumber: str = ""  # noqa: N815 - as the file has it
    streetName: str = ""  # noqa: N815
    city: str = ""


_Latitude = Annotated[float, msgspec.Meta(ge=-90, le=90)]
_Longitude = Annotated[float, msgspec.Meta(ge=-180, le=180)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class _Hotel(msgspec.Struct, frozen=True):
    id: _Name
    name: str
    phoneNumber: str = ""  # noqa: N815
    address: _Address = _Address()


class _Geo(msgspec.Struct, frozen=True):
    hotelId: str  # noqa: N815
    lat: _Latitude
    lon: _Longitude


class _RoomType(msgspec.Struct, frozen=True):
    bookableRate: Annotated[float, msgspec.Meta(ge=0)]  # noqa: N815


class _Inventory(msgspec.Struct, frozen=True):
    hotelId: str  # noqa: N815
    roomType: _RoomType  # noqa: N815


def generated_hotels(*, count: int = HOTELS, seed: int = 1) -> list[Known]:
    """Return generated hotels around a city; the same seed gives the same hotels."""
    choose = random.Random(seed)  # noqa: S311 - no secret
    return [_generated(str(number + 1), choose) for number in range(count)]


def read_hotels(directory: Path, *, count: int = HOTELS, seed: int = 1) -> list[Known]:
    """Return the hotels in a directory, and further generated hotels up to `count`.

    Raises:
        HotelDataError: a file is missing or invalid.
    """
    hotels = _read(directory, "hotels.json", list[_Hotel])
    places = {one.hotelId: one for one in _read(directory, "geo.json", list[_Geo])}
    prices = {
        one.hotelId: one.roomType.bookableRate
        for one in _read(directory, "inventory.json", list[_Inventory])
    }
    choose = random.Random(seed)  # noqa: S311 - no secret
    known = {}
    for hotel in hotels:
        if hotel.id not in places:
            raise HotelDataError(f"geo.json in {directory} does not say where hotel {hotel.id} is.")
        made, place, address = _generated(hotel.id, choose), places[hotel.id], hotel.address
        known[hotel.id] = Known(
            id=hotel.id,
            name=hotel.name,
            lat=place.lat,
            lon=place.lon,
            rating=made.rating,
            price=prices.get(hotel.id, made.price),
            phone=hotel.phoneNumber,
            address=f"{address.streetNumber} {address.streetName}, {address.city}".strip(" ,"),
        )
    numbers = (str(number) for number in range(1, count + len(known) + 1))
    more = [_generated(number, choose) for number in numbers if number not in known]
    return [*known.values(), *more][: max(count, len(known))]


def _read(directory: Path, name: str, kind: Any) -> Any:  # noqa: ANN401 - the given kind
    try:
        with (directory / name).open("rb") as file:
            text = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise HotelDataError(f"{directory / name} cannot be read: {error.strerror}.") from error
    if len(text) > _FILE_BYTES_MAX:
        raise HotelDataError(f"{directory / name} has more than {_FILE_BYTES_MAX:,} bytes.")
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HotelDataError(f"{directory / name} is not as expected: {error}.") from error


def _generated(number: str, choose: random.Random) -> Known:
    return Known(
        id=number,
        name=f"{choose.choice(_FIRST)} {choose.choice(_SECOND)} {number}",
        lat=round(CENTRE[0] + choose.uniform(-_SPREAD_DEGREES, _SPREAD_DEGREES), 5),
        lon=round(CENTRE[1] + choose.uniform(-_SPREAD_DEGREES, _SPREAD_DEGREES), 5),
        rating=choose.randint(10, 50) / 10,
        price=float(choose.randint(60, 400)),
        phone=f"(415) 555-{choose.randint(0, 9999):04}",
        address=f"{choose.randint(1, 900)} {choose.choice(_FIRST)} Street",
    )


def main() -> None:
    """Read the directory that the argument names. If it is invalid, print why and exit with
    code 2.
    """
    try:
        read_hotels(Path(sys.argv[1]))
    except HotelDataError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
