"""Notifies systemd that this process is ready, and that its event loop runs (sd_notify(3)).

The protocol is one datagram per message to the socket that `NOTIFY_SOCKET` names. With
`WatchdogSec=`, systemd ends and restarts a process that sends no `WATCHDOG=1` within this time.
`machine_process` calls these functions.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from typing import Final, NoReturn

READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"
WATCHDOG: Final = "WATCHDOG=1"


def notify(message: str, environment: Mapping[str, str] | None = None) -> bool:
    """Send a message to the service manager. Return whether a service manager took it."""
    address = (os.environ if environment is None else environment).get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = f"\0{address[1:]}"  # an abstract socket
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sending:
        sending.settimeout(0)
        try:
            sending.sendto(message.encode(), address)
        except OSError:
            return False
    return True


def watchdog_s(environment: Mapping[str, str] | None = None) -> float | None:
    """Return the seconds between two `WATCHDOG=1` messages, which are half of the time that the
    service manager allows. None: it has no watchdog for this process.
    """
    given = os.environ if environment is None else environment
    if given.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    usec = given.get("WATCHDOG_USEC", "")
    return int(usec) / 2e6 if usec.isascii() and usec.isdigit() and int(usec) else None


async def report_life(every_s: float) -> NoReturn:
    """Report that the event loop runs, until cancelled."""
    while True:
        notify(WATCHDOG)
        await asyncio.sleep(every_s)
