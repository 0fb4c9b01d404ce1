"""The command line of ``node-cache``: upstream's flags, and ours, as one table.

Decides which flags exist, their defaults and limits, and turns an argument
list into ``Params``, the agent's whole configuration. Never reads a file, the
environment or the machine. Flag names and defaults are Kubernetes' node-cache's;
where a value of theirs had a trap, ``docs/node-cache.md`` says what we do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Literal, NamedTuple, cast

from cni_hostport.model import Family, family_of
from cni_hostport.nodecache import goflags
from cni_hostport.nodecache.goflags import FlagError, bad

Engine = Literal["auto", "coredns", "unbound", "none"]
Backend = Literal["auto", "iptables", "nftables"]
ClientAuth = Literal[
    "NoClientCert",
    "RequestClientCert",
    "RequireAnyClientCert",
    "VerifyClientCertIfGiven",
    "RequireAndVerifyClientCert",
]
IFNAMSIZ = 16


class Flag(NamedTuple):
    """One flag: default as text, ``choices`` where only some words are valid."""

    name: str
    default: str
    help: str
    boolean: bool = False
    choices: tuple[str, ...] = ()
    ours: bool = False


FLAGS: tuple[Flag, ...] = (
    Flag("localip", "", "comma-separated addresses to answer on; must be given"),
    Flag("setupinterface", "true", "create and keep the link that holds the addresses", True),
    Flag("interfacename", "nodelocaldns", "name of that link"),
    Flag("syncinterval", "60", "how often rules and link are checked: seconds or a duration"),
    Flag("metrics-listen-address", "0.0.0.0:9353", 'address of the metrics; "0" or "" is none'),
    Flag("setupiptables", "true", "install and keep the packet filter's rules", True),
    Flag("basecorefile", "/etc/coredns/Corefile.base", "template of the Corefile"),
    Flag("corefile", "/etc/Corefile", "accepted and not used: -conf names the file"),
    Flag("kubednscm", "", "folder of the kube-dns ConfigMap; unset: /etc/kube-dns if it exists"),
    Flag("upstreamsvc", "kube-dns", "Service whose cluster IP stands for the cluster's DNS"),
    Flag("health-port", "8080", "port of the health check, for its rules"),
    Flag("skipteardown", "false", "leave rules, link and DNS server in place at the end", True),
    Flag("reloadwithsignal", "false", "reload CoreDNS by SIGUSR1 after each change", True),
    Flag("prometheus-listen-address", ":9253", "address for the template's prometheus line"),
    Flag("tls-enabled", "false", "serve the metrics by TLS", True),
    Flag("tls-cert-file", "/etc/ssl/tls.crt", "certificate of the metrics"),
    Flag("tls-private-key-file", "/etc/ssl/tls.key", "its key"),
    Flag("tls-client-ca-file", "", "authority that clients of the metrics must come from"),
    Flag(
        "tls-client-auth-type",
        "NoClientCert",
        "what is asked of clients of the metrics",
        choices=(
            "NoClientCert",
            "RequestClientCert",
            "RequireAnyClientCert",
            "VerifyClientCertIfGiven",
            "RequireAndVerifyClientCert",
        ),
    ),
    Flag("tls-min-version", "TLS13", "oldest TLS", choices=("TLS10", "TLS11", "TLS12", "TLS13")),
    Flag("conf", "", "the Corefile: written by the agent, read by the DNS server"),
    Flag("pidfile", "", "file that holds the agent's pid once the DNS server answers"),
    Flag("dns.port", "53", "port of the DNS server"),
    Flag("p", "53", "the same as -dns.port"),
    Flag("plugins", "false", "print the Corefile directives that the engine knows, and exit", True),
    Flag("version", "false", "print the version and exit", True),
    Flag("quiet", "false", "let CoreDNS be quiet at start", True),
    Flag(
        "interfacekind", "dummy", "kind of the link: dummy, or ifb", False, ("dummy", "ifb"), True
    ),
    Flag(
        "engine",
        "auto",
        "DNS server to run; none: one that runs already",
        choices=("auto", "coredns", "unbound", "none"),
        ours=True,
    ),
    Flag("enginepath", "", "the DNS server's executable; unset: looked up in PATH", ours=True),
    Flag(
        "backend",
        "auto",
        "packet filter to use",
        choices=("auto", "iptables", "nftables"),
        ours=True,
    ),
    Flag("accepthealth", "false", "also accept the health check's packets", True, ours=True),
)
_BY_NAME = {flag.name: flag for flag in FLAGS}


class LocalIP(NamedTuple):
    """One address to answer on, and how the command line spelled it."""

    address: IPv4Address | IPv6Address
    text: str

    @property
    def family(self) -> Family:
        """Its address family."""
        return family_of(self.address)


@dataclass(frozen=True)
class TLSParams:
    """TLS of the metrics listener."""

    enabled: bool
    cert_file: str
    key_file: str
    client_ca_file: str
    client_auth: ClientAuth
    min_version: str


@dataclass(frozen=True)
class Params:
    """Everything the command line decides. ``sync_interval`` in seconds."""

    local_ips: tuple[LocalIP, ...]
    setup_interface: bool
    interface_name: str
    interface_kind: str
    sync_interval: float
    metrics_address: str
    setup_iptables: bool
    base_corefile: str
    kubedns_dir: str
    upstream_service: str
    health_port: int
    skip_teardown: bool
    reload_with_signal: bool
    prometheus_address: str
    tls: TLSParams
    conf: str
    pidfile: str
    dns_port: int
    quiet: bool
    engine: Engine
    engine_path: str
    backend: Backend
    accept_health: bool
    notes: tuple[str, ...] = ()

    @property
    def families(self) -> tuple[Family, ...]:
        """Families that have an address, IPv4 first."""
        return tuple(f for f in Family if any(ip.family is f for ip in self.local_ips))


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for: a run, or one line of text and the end."""

    params: Params | None
    show: Literal["run", "version", "plugins", "help"] = "run"


def parse(argv: Sequence[str]) -> Wanted:
    """Read the command line. Raises FlagError naming flag and value."""
    names = [flag.name for flag in FLAGS if not flag.boolean]
    booleans = [flag.name for flag in FLAGS if flag.boolean] + ["h", "help"]
    given, rest = goflags.scan(argv, names, booleans)
    asks: dict[str, Literal["help", "version", "plugins"]] = {
        "h": "help",
        "help": "help",
        "version": "version",
        "plugins": "plugins",
    }
    for ask, show in asks.items():
        if ask in given and goflags.boolean(ask, given[ask]):
            return Wanted(None, show)
    if rest:
        raise FlagError(f"extra command line arguments: {' '.join(rest)}")
    if "p" in given:
        given.setdefault("dns.port", given["p"])
    if given.get("conf") == "stdin":
        raise bad("conf", "stdin", "the agent must be able to write the file")
    return Wanted(_params(given))


def _params(given: dict[str, str]) -> Params:
    def text(name: str) -> str:
        value = given.get(name, _BY_NAME[name].default)
        choices = _BY_NAME[name].choices
        if choices and value not in choices:
            raise bad(name, value, f"must be one of {', '.join(choices)}")
        return value

    def flag(name: str) -> bool:
        return goflags.boolean(name, text(name))

    unused = ("-corefile is not used: -conf names the file",) if "corefile" in given else ()
    local_ips, notes = parse_local_ips(text("localip"))
    return Params(
        local_ips=local_ips,
        setup_interface=flag("setupinterface"),
        interface_name=_link_name(text("interfacename")),
        interface_kind=text("interfacekind"),
        sync_interval=goflags.seconds("syncinterval", text("syncinterval")),
        metrics_address=_listen("metrics-listen-address", text("metrics-listen-address")),
        setup_iptables=flag("setupiptables"),
        base_corefile=text("basecorefile"),
        kubedns_dir=text("kubednscm"),
        upstream_service=text("upstreamsvc"),
        health_port=goflags.port("health-port", text("health-port")),
        skip_teardown=flag("skipteardown"),
        reload_with_signal=flag("reloadwithsignal"),
        prometheus_address=_listen("prometheus-listen-address", text("prometheus-listen-address")),
        tls=_tls(text, flag("tls-enabled")),
        conf=text("conf"),
        pidfile=text("pidfile"),
        dns_port=goflags.port("dns.port", text("dns.port")),
        quiet=flag("quiet"),
        engine=cast("Engine", text("engine")),
        engine_path=text("enginepath"),
        backend=cast("Backend", text("backend")),
        accept_health=flag("accepthealth"),
        notes=(*notes, *unused),
    )


def _tls(text: Callable[[str], str], enabled: bool) -> TLSParams:
    return TLSParams(
        enabled,
        text("tls-cert-file"),
        text("tls-private-key-file"),
        text("tls-client-ca-file"),
        cast("ClientAuth", text("tls-client-auth-type")),
        text("tls-min-version"),
    )


def parse_local_ips(text: str) -> tuple[tuple[LocalIP, ...], tuple[str, ...]]:
    """Addresses of ``-localip`` and what is worth a warning about them.

    Both families may be mixed. Raises FlagError, also for an empty list.
    """
    found: dict[str, LocalIP] = {}
    notes: list[str] = []
    for word in text.split(","):
        address = goflags.address(word)
        if address is None:
            raise bad("localip", text, f'invalid localip specified - "{word}"')
        if str(address) in found:
            notes.append(f"-localip names {word} twice")
            continue
        if address.is_link_local and address.version == 6:
            notes.append(f"-localip {word}: a DNS server cannot bind fe80::/10, use fd00::/8")
        spelled = str(address) if word.lower().startswith("::ffff:") else word
        found[str(address)] = LocalIP(address, spelled)
    return tuple(found.values()), tuple(notes)


def _link_name(name: str) -> str:
    if (
        not 0 < len(name.encode()) < IFNAMSIZ
        or name in (".", "..")
        or any(c in "/: \t\n" for c in name)
    ):
        raise bad("interfacename", name, "a link's name is 1 to 15 characters, no blank, / or :")
    return name


def _listen(flag: str, value: str) -> str:
    if value in ("", "0"):
        return ""
    if goflags.split_address(value) is None:
        raise bad(flag, value, "must be host:port or :port")
    return value
