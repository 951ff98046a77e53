"""Which network interface an address belongs to."""

from __future__ import annotations

import ipaddress


def interface_of(address: str) -> str:
    """Name of the interface that has an IP address, or else of one whose network the address is in.

    gloo is told the interface, because it would otherwise take the one that this machine's host name resolves to, which
    is often loopback.

    Raises:
        OSError: there is none.
    """
    import psutil

    wanted, in_network = ipaddress.ip_address(address), None
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            try:
                # Link-local addresses carry their interface behind a percent sign.
                interface = ipaddress.ip_interface(
                    f"{entry.address.partition('%')[0]}/{entry.netmask or ''}".rstrip("/")
                )
            except ValueError:
                # A hardware address.
                continue
            if interface.ip == wanted:
                return name
            if entry.netmask and wanted in interface.network:
                in_network = in_network or name
    if in_network is None:
        raise OSError(f"no network interface of this machine has the address {address}")
    return in_network
