"""Which flavour of iptables a node uses: pure.

As kube-proxy's own image decides: where the kubelet or kube-proxy has put its
chains, there all rules belong. Else where ours are already, else what
``iptables`` on the PATH is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cni_hostport.hostport import iptnames as names

_KUBELET = ("KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY")
_KUBE_PROXY = ("KUBE-PROXY-CANARY", "KUBE-SERVICES", "KUBE-POSTROUTING", "KUBE-MARK-MASQ")
OURS = (
    names.MASQUERADE,
    names.SNAT,
    names.EXCLUDED,
    names.HELD,
    names.FORWARD,
    names.OPEN,
)


def choose_flavour(
    found: Mapping[str, Iterable[str]], installed: Iterable[str], on_path: str | None
) -> str | None:
    """The flavour to use, None where no tool is installed.

    ``found``: names of the chains in each flavour's tables; ``installed``:
    flavours that have tools, the preferred first.
    """
    present = list(installed)
    chains = {flavour: frozenset(found.get(flavour, ())) for flavour in present}
    for evidence in (_KUBELET, _KUBE_PROXY, OURS, (names.HOSTPORTS,)):
        for flavour in present:
            if chains[flavour].intersection(evidence):
                return flavour
    if on_path in present:
        return on_path
    return present[0] if present else None


def has_ours(chains: Iterable[str]) -> bool:
    """Whether one of our own chains is among the names."""
    return not frozenset(chains).isdisjoint(OURS)
