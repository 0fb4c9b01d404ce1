"""Findings about conflists, plugin folders and other programs that map or reserve ports. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from cni_hostport import cni_json
from cni_hostport.cni_conflist import Plugin
from cni_hostport.cni_options import parse_options
from cni_hostport.doctor.facts import Facts, Finding
from cni_hostport.errors import HostPortError
from cni_hostport.host.confdirs import ConfFile

NAME, PORTMAP = "cni-hostport", "portmap"
META = {"portmap", "bandwidth", "tuning", "firewall", "sbr", "vrf", "debug", "dnsname", NAME}
"""Plugins that give a pod no address; one that is not among them is taken for a main plugin."""

NERDCTL_RESERVES = (2, 1, 6)


def ours(facts: Facts) -> list[tuple[ConfFile, Plugin]]:
    """Every entry of this plugin on the node."""
    return [(f, p) for f in facts.conflists if f.conflist for p in f.conflist.of_type(NAME)]


def findings(facts: Facts) -> Iterator[Finding]:
    """Everything about configurations."""
    for file in facts.conflists:
        yield from _file(file)
    yield from _portmap(facts)
    yield from _reservers(facts)
    yield from _crio(facts)
    for line in facts.conflicts:
        yield Finding(
            "reservation-conflict",
            "warning",
            line,
            'stop that process, a hostIP of its own for the pod, or "reservePorts": "try"',
        )
    yield from _folders(facts)


def _file(file: ConfFile) -> Iterator[Finding]:
    if file.conflist is None:
        yield Finding(
            "broken-conflist", "warning", f"{file.path}: {file.problem}", f"$EDITOR {file.path}"
        )
        return
    for number, plugin in enumerate(file.conflist.plugins):
        if plugin.type != NAME:
            continue
        where = f"{file.path} line {plugin.line}"
        if not any(p.type not in META for p in file.conflist.plugins[:number]):
            yield Finding(
                "plugin-order",
                "error",
                f"{where}: {NAME} stands before the plugin that gives the pod its address: "
                "it has nothing to map to",
                f"move its entry to the end of plugins in {file.path}",
            )
        if not _gets_ports(plugin):
            yield Finding(
                "no-capability",
                "error",
                f'{where}: without "capabilities": {{ "portMappings": true }} the runtime passes '
                "no host ports",
                f"add it to the entry of {NAME} in {file.path}",
            )
        try:
            parse_options(cni_json.fold(plugin.options))
        except HostPortError as error:
            yield Finding(
                "bad-option", "error", f"{where}: {error}: every ADD fails", f"$EDITOR {file.path}"
            )


def _gets_ports(plugin: Plugin) -> bool:
    capabilities = plugin.options.get("capabilities")
    told = isinstance(capabilities, dict) and capabilities.get("portMappings") is True
    static = plugin.options.get("portMappings") or plugin.options.get("portMappingsAnnotation")
    return told or bool(static)


def _portmap(facts: Facts) -> Iterator[Finding]:
    for file in facts.conflists:
        if file.conflist is None:
            continue
        mine = file.conflist.of_type(NAME)
        for plugin in file.conflist.of_type(PORTMAP):
            where = f"{file.path} line {plugin.line}"
            if mine:
                text = f"{where}: portmap and, in line {mine[0].line}, {NAME} map the same ports"
                yield Finding("portmap-twice", "error", text, f"take portmap out of {file.path}")
            else:
                text = f"{where}: portmap maps host ports on this node and reserves none"
                mend = f"cni-hostport install --conflist {file.path}"
                yield Finding("portmap-active", "warning", text, mend)


def _reservers(facts: Facts) -> Iterator[Finding]:
    """Runtimes that bind the ports themselves, before or after the plugin does."""
    strict = [(f, p) for f, p in ours(facts) if p.options.get("reservePorts", "require") != "no"]
    if not strict:
        return
    where = f"{strict[0][0].path} line {strict[0][1].line}"
    conf = facts.others.podman_conf
    backend, reserves = conf.get("network_backend"), conf.get("enable_port_reservation")
    if facts.others.podman and not (reserves and reserves.value == "false"):
        uses_cni = backend is not None and backend.value == "cni"
        said = f" ({reserves})" if reserves else " (its default)"
        yield Finding(
            "podman-reserves",
            "warning" if uses_cni else "info",
            f"podman reserves published ports itself{said}: with a CNI network, `podman run -p` "
            f"and {NAME} ({where}) would both want the port",
            "enable_port_reservation = false under [engine] in /etc/containers/containers.conf, or "
            '"reservePorts": "no" in podman\'s conflist',
        )
    if facts.others.nerdctl and facts.others.nerdctl >= NERDCTL_RESERVES:
        version = ".".join(map(str, facts.others.nerdctl))
        yield Finding(
            "nerdctl-reserves",
            "warning",
            f"nerdctl {version} reserves published ports itself before it calls plugins: ADD by "
            f"{NAME} ({where}) then finds them in use",
            '"reservePorts": "no" in the conflist that nerdctl uses',
        )


def _crio(facts: Facts) -> Iterator[Finding]:
    line = facts.others.crio_mapping
    if not facts.others.crio or (line is not None and line.value == "true"):
        return
    said = f"{line} says {line.value}" if line else "crio.conf does not say otherwise"
    yield Finding(
        "crio-manager",
        "warning",
        f"CRI-O maps host ports itself ({said}) and never passes them to a plugin",
        "disable_hostport_mapping = true under [crio.runtime] in crio.conf, and "
        "portMappingsAnnotation in the conflist; see conflist-examples/crio-annotation.conflist",
    )


def _folders(facts: Facts) -> Iterator[Finding]:
    states = facts.place.plugins
    if not ours(facts) or "ok" in states.values():
        bad = {d: s for d, s in states.items() if s not in ("ok", "missing")}
    else:
        bad = dict(states)
    for folder, state in bad.items():
        yield Finding(
            "plugin-missing",
            "error",
            f"{folder}/{NAME} is {state}: a runtime that looks there cannot run the plugin",
            f"cni-hostport install --bin-dir {folder}",
        )
