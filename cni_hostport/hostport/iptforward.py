"""openForward as iptables rules: pure.

A scheme of its own, since it serves the nftables backend as well: an accept in
an nft table cannot overrule the DROP policy of iptables' FORWARD chain.
"""

from __future__ import annotations

from cni_hostport.hostport import iptnames as names
from cni_hostport.hostport.iptplan import (
    Member,
    Rules,
    comment_words,
    destinations,
    original_to,
    unusual,
)
from cni_hostport.hostport.iptscheme import Hook, Scheme, Shared, answering_prefixes
from cni_hostport.hostport.node import NodeView
from cni_hostport.hostport.placed import Placed
from cni_hostport.model import Family


def forward_rules(placed: Placed, node: NodeView) -> dict[Family, Rules]:
    """Accepts connections this attachment's mappings translate, in both directions."""
    attachment, out = placed.attachment, {}
    key = comment_words(names.owner_comment(placed.key))
    for family in attachment.families() if attachment.options.open_forward else ():
        pod = attachment.address(family)
        members: dict[Member, None] = {}
        for mapping in attachment.mappings:
            if pod is None or not attachment.maps(mapping, family):
                continue
            match = (
                *("-m", "conntrack", "--ctstate", "DNAT"),
                *("--ctproto", str(mapping.protocol.number)),
                *("--ctorigdstport", str(mapping.host_port), "--ctreplsrc", str(pod.ip)),
                *("--ctreplsrcport", str(mapping.container_port)),
            )
            members[Member("filter", names.OPEN, (*key, *match, "-j", "ACCEPT"))] = None
            where = destinations(family, mapping, attachment.options, node)
            for m in unusual(family, where, placed, node):
                args = (*m.args[:-1], names.OPEN)
                members[Member("filter", names.FORWARD, args)] = None
        if members:
            out[family] = Rules(members=tuple(members))
    return out


def _forward_node(node: NodeView) -> dict[Family, Rules]:
    return {
        f: Rules(
            members=tuple(
                Member("filter", names.FORWARD, original_to(p, names.OPEN))
                for p in answering_prefixes(f, node)
            )
        )
        for f in Family
    }


def _forward_chains(family: Family) -> tuple[Shared, ...]:
    del family
    translated = (
        *comment_words(names.FORWARD_COMMENT),
        *("-m", "conntrack", "--ctstate", "DNAT", "-j", names.FORWARD),
    )
    hook = Hook("filter", "FORWARD", translated, first=True)
    return (
        Shared("filter", names.OPEN),
        Shared("filter", names.FORWARD, (hook,)),
    )


def _no_hooks(family: Family) -> tuple[Hook, ...]:
    del family
    return ()


FORWARD_SCHEME = Scheme(
    name="openForward",
    attachment=forward_rules,
    node=_forward_node,
    shared=_forward_chains,
    bare=_no_hooks,
    mappings=False,
    chains=frozenset((names.FORWARD, names.OPEN)),
    comments=frozenset((names.FORWARD_COMMENT,)),
)
