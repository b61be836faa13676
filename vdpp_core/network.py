"""Addresses of this machine, seen from the way to another one. Nothing is sent."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def address_towards(host: str, port: int) -> tuple[str, bool]:
    """This machine's address on the way to a host, and whether this machine is that host.

    Raises:
        OSError: there is no such host, or no way to it.
    """
    family, kind, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as datagrams:
        datagrams.connect(place)
        own = str(datagrams.getsockname()[0])
    return own, own == place[0]


def is_loopback(address: str) -> bool:
    """Whether no other machine reaches this address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str | None:
    """The name of this machine's network interface with that address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None
