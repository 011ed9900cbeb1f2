"""Distinguishes public addresses, to which clients could connect themselves, from addresses that only this server
reaches."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

# IANA's special-purpose registries (RFC 6890), independent of the Python version, including globally reachable parts,
# such as 192.0.0.9, which serve no files.
SPECIAL_IPV4 = [
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",
        "100.64.0.0/10",  # a provider's own; Alibaba's metadata service is 100.100.100.200
        "127.0.0.0/8",
        "168.63.129.16/32",  # Azure's services for its machines
        "161.26.0.0/16",  # IBM Cloud's services for its machines
        "166.8.0.0/14",  # the same
        "169.254.0.0/16",  # link-local, with most metadata services
        "172.16.0.0/12",
        "192.0.0.0/24",  # protocols; Oracle's older metadata service is 192.0.0.192
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # multicast tunnels
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/3",  # multicast, reserved, broadcast
    )
]
# everything else is special: loopback, ::a.b.c.d, fec0::/10, fc00::/7, fe80::/10, 64:ff9b:1::/48, ff00::/8, ...
GLOBAL_UNICAST = IPv6Network("2000::/3")
SPECIAL_IPV6 = [
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocols, with Teredo's tunnels
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4's tunnels
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
    )
]
NAT64 = IPv6Network("64:ff9b::/96")
ISATAP = (0x00005EFE, 0x02005EFE)  # the upper half of an interface identifier; the lower is an IPv4 address


def reached_address(host: str) -> IPv4Address | IPv6Address:
    """Return the address at which a connection to `host` ends, looking through the well-known NAT64 prefix.

    host: an address from getaddrinfo, perhaps with a scope (fe80::1%eth0).
    """
    address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether `address` is on the public internet; False for addresses of tunnels."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in SPECIAL_IPV4)
    if int(address) >> 32 & 0xFFFFFFFF in ISATAP or address not in GLOBAL_UNICAST:
        return False
    return not any(address in network for network in SPECIAL_IPV6)
