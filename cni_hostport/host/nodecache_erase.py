"""Takes rules that iptables-nft made out of the kernel, without running a process.

Decides only how a rule with one of the given comments is recognised; which
comments are ours is told. One transaction for all tables: no packet sees a
part of the removal.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from contextlib import closing

from cni_hostport.host.nfsocket import NETLINK_NETFILTER, NetfilterSocket
from cni_hostport.host.nlsocket import NetlinkSocket
from cni_hostport.model import Family
from cni_hostport.netfilter import nfmsg, nlwire

TABLES = ("raw", "filter")
_TABLE, _CHAIN, _HANDLE, _USERDATA = 1, 2, 3, 7
# struct xt_comment_info, as the information of a "comment" match.
_MATCH_INFO, _COMMENT_SIZE = 3, 256


def erase(family: Family, comments: Collection[str]) -> int:
    """Remove every rule of raw and filter with one of these comments; how many there were.

    Raises OSError with nothing changed.
    """
    marks = [mark for comment in comments for mark in _encoded(comment)]
    with closing(NetlinkSocket(NETLINK_NETFILTER)) as netlink:
        places = [place for table in TABLES for place in _found(netlink, family, table, marks)]
    if places:
        _delete(places)
    return len(places)


def _encoded(comment: str) -> tuple[bytes, bytes]:
    """A comment as a match, and as older iptables-nft keeps it in the rule's user data."""
    text = nlwire.string(comment)
    return (
        nlwire.attr(_MATCH_INFO, text.ljust(_COMMENT_SIZE, b"\0")),
        nlwire.attr(_USERDATA, bytes((0, len(text))) + text),
    )


def _found(
    netlink: NetlinkSocket, family: Family, table: str, marks: Collection[bytes]
) -> list[bytes]:
    asked = nlwire.genmsg(nfmsg.AF_NUMBER[family]) + nlwire.attr(_TABLE, nlwire.string(table))
    try:
        rules = netlink.dump(nfmsg.GETRULE, asked)
    except FileNotFoundError:
        return []
    places = []
    for rule in rules:
        if any(mark in rule.body for mark in marks):
            of = nlwire.attribute_map(rule.body, nlwire.GENMSG_SIZE)
            place = b"".join(nlwire.attr(key, of[key]) for key in (_TABLE, _CHAIN, _HANDLE))
            places.append(nlwire.genmsg(nfmsg.AF_NUMBER[family]) + place)
    return places


def _delete(places: list[bytes]) -> None:
    batch = nfmsg.delete_rules(places, 1)
    with closing(NetfilterSocket()) as netlink:
        netlink.send(batch.data)
        answers = [m for data in netlink.drain() for m in nlwire.messages(data)]
    acks = [nlwire.ack(m) for m in answers if m.kind == nlwire.NLMSG_ERROR]
    refused = [ack.errno for ack in acks if ack.errno]
    if refused or not acks:
        number = refused[0] if refused else errno.EPROTO
        raise OSError(number, os.strerror(number))
