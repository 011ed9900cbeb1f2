from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.parts.images.public_address import is_public, reached_address


@pytest.mark.parametrize(
    "host",
    [
        # clouds' services for their own machines, on addresses of which some look public
        "168.63.129.16", "169.254.169.254", "100.100.100.200", "192.0.0.192", "161.26.0.10", "166.9.0.1",
        "fd00:ec2::254",
        # special by IANA's registries
        "0.0.0.0", "10.0.0.1", "100.64.0.1", "127.0.0.1", "172.31.255.255", "192.0.0.9", "192.0.0.170", "192.0.2.1",
        "192.31.196.1", "192.52.193.1", "192.88.99.1", "192.168.0.1", "192.175.48.1", "198.19.255.255", "198.51.100.1",
        "203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255",
        "::", "::1", "100::1", "2001:1::1", "2001:2::1", "2001:3::1", "2001:4:112::1", "2001:10::1", "2001:20::1",
        "2001:30::1", "2001:db8::1", "2620:4f:8000::1", "3fff::1", "5f00::1", "fc00::1", "fd12::1", "fe80::1%eth0",
        "febf::1", "fec0::1", "feff::1", "ff02::1", "4000::1",
        # which lead to an IPv4 address, or may: mapped, compatible, translated, NAT64, 6to4, Teredo, ISATAP
        "::ffff:127.0.0.1", "::ffff:a9fe:a9fe", "::ffff:168.63.129.16", "::127.0.0.1", "::8.8.8.8",
        "::ffff:0:127.0.0.1", "::ffff:0:8.8.8.8", "64:ff9b::127.0.0.1", "64:ff9b::168.63.129.16",
        "64:ff9b::192.0.0.1", "64:ff9b:1::8.8.8.8",
        "64:ff9b:1:ffff::1", "2002:7f00:1::", "2002:808:808::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "2606:2800:220:1:0:5efe:10.0.0.1", "2606:2800:220:1:200:5efe:8.8.8.8", "fe80::5efe:10.0.0.1",
    ],
)  # fmt: skip
def test_an_address_that_is_special_or_may_lead_to_such_a_one_is_not_public(host):
    assert not is_public(reached_address(host))


@pytest.mark.parametrize(
    "host",
    [
        "8.8.8.8", "93.184.216.34", "168.63.129.17", "192.0.1.1", "223.255.255.255", "2606:2800:220:1::1",
        "2a00:1450::8", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8",
    ],
)  # fmt: skip
def test_an_address_of_the_internet_is_public(host):
    assert is_public(reached_address(host))


@given(st.ip_addresses())
def test_no_address_is_public_that_python_knows_to_be_none(address: ipaddress.IPv4Address | ipaddress.IPv6Address):
    assert address.is_global or not is_public(reached_address(str(address)))


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_within_an_ipv6_address_is_judged_as_itself(address: ipaddress.IPv4Address):
    for prefix in (0xFFFF << 32, 0x64FF9B << 96):
        assert reached_address(str(ipaddress.IPv6Address(prefix | int(address)))) == address
