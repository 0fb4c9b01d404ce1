"""Upstream's command line (facts a2), both dash styles, and errors that name flag and value."""

import re
from pathlib import Path

import pytest

from cni_hostport.model import Family
from cni_hostport.nodecache import flags, goflags, usage


def params(*argv: str) -> flags.Params:
    wanted = flags.parse(("-localip", "169.254.20.10", *argv)).params
    assert wanted is not None
    return wanted


def test_defaults_are_upstreams() -> None:
    found = params()
    assert (found.interface_name, found.sync_interval, found.metrics_address) == (
        "nodelocaldns",
        60,
        "0.0.0.0:9353",
    )
    assert (found.base_corefile, found.upstream_service) == (
        "/etc/coredns/Corefile.base",
        "kube-dns",
    )
    assert (found.health_port, found.dns_port, found.prometheus_address) == (8080, 53, ":9253")
    assert found.setup_interface and found.setup_iptables
    assert not (found.skip_teardown or found.reload_with_signal or found.tls.enabled)
    assert (found.tls.cert_file, found.tls.min_version) == ("/etc/ssl/tls.crt", "TLS13")
    assert (found.interface_kind, found.engine, found.backend) == ("dummy", "auto", "auto")


def test_the_addons_arguments() -> None:
    found = flags.parse(
        [
            "-localip",
            "169.254.20.10,10.96.0.10",
            "-conf",
            "/etc/Corefile",
            "-upstreamsvc",
            "kube-dns-upstream",
        ]
    ).params
    assert found is not None
    assert [ip.text for ip in found.local_ips] == ["169.254.20.10", "10.96.0.10"]
    assert found.conf == "/etc/Corefile"


@pytest.mark.parametrize("dash", ["-", "--"])
@pytest.mark.parametrize("flag", flags.FLAGS, ids=lambda f: f.name)
def test_every_flag_takes_both_dash_styles(flag: flags.Flag, dash: str) -> None:
    value = "127.0.0.1" if flag.name == "localip" else flag.default
    argv = [] if flag.name == "localip" else ["-localip=1.1.1.1"]
    assert flags.parse([*argv, f"{dash}{flag.name}={value}"])
    if not flag.boolean:
        assert flags.parse([*argv, f"{dash}{flag.name}", value])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["-localip", ""], ["localip", '""']),
        (["-localip", "1.1.1.1, 2.2.2.2"], ["localip", '" 2.2.2.2"']),
        (["-localip", "169.254.20.10,invalid"], ["localip", '"invalid"']),
        (["-localip", "10.0.0.0/8"], ["localip"]),
        (["-localip", "010.0.0.1"], ["localip"]),
        (["-localip", "fe80::1%eth0"], ["localip"]),
        (["-health-port", "http"], ["health-port", "http"]),
        (["-health-port", "70000"], ["health-port", "70000"]),
        (["-health-port", "1_0"], ["health-port", "1_0"]),
        (["-dns.port", "0"], ["dns.port", "0"]),
        (["-p", "x"], ["dns.port", "x"]),
        (["-syncinterval", "soon"], ["syncinterval", "soon"]),
        (["-syncinterval", "0s"], ["syncinterval", "0s"]),
        (["-syncinterval", "-5"], ["syncinterval", "-5"]),
        (["-setupiptables=maybe"], ["setupiptables", "maybe"]),
        (["-interfacename", "a-name-of-16-chars"], ["interfacename"]),
        (["-interfacename", "a/b"], ["interfacename", "a/b"]),
        (["-interfacekind", "bond"], ["interfacekind", "bond"]),
        (["-engine", "bind"], ["engine", "bind"]),
        (["-backend", "ebpf"], ["backend", "ebpf"]),
        (["-tls-client-auth-type", "Maybe"], ["tls-client-auth-type", "Maybe"]),
        (["-tls-min-version", "SSL3"], ["tls-min-version", "SSL3"]),
        (["-metrics-listen-address", "nowhere"], ["metrics-listen-address", "nowhere"]),
        (["-conf", "stdin"], ["conf", "stdin"]),
        (["-nosuch", "1"], ["-nosuch"]),
        (["-conf"], ["-conf"]),
        (["-setupiptables", "false"], ["false"]),
        (["---x"], ["---x"]),
    ],
)
def test_errors_name_flag_and_value(argv: list[str], words: list[str]) -> None:
    if "-localip" not in argv:
        argv = ["-localip", "1.1.1.1", *argv]
    with pytest.raises(goflags.FlagError) as error:
        flags.parse(argv)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60", 60),
        ("60s", 60),
        ("1m30s", 90),
        ("0.5s", 0.5),
        ("250ms", 0.25),
        ("60ns", 60),
        ("+5", 5),
    ],
)
def test_the_interval_takes_seconds_and_durations(text: str, seconds: float) -> None:
    assert params("-syncinterval", text).sync_interval == pytest.approx(seconds)


def test_metrics_can_be_switched_off() -> None:
    assert params("-metrics-listen-address", "0").metrics_address == ""
    assert params("-metrics-listen-address=").metrics_address == ""


@pytest.mark.parametrize(
    ("text", "families"),
    [
        ("169.254.20.10,10.0.0.10", (Family.V4,)),
        ("fd00:1:2:3::5", (Family.V6,)),
        ("fd00:1:2:3::5,169.254.20.10", (Family.V4, Family.V6)),
        ("::ffff:1.2.3.4", (Family.V4,)),
    ],
)
def test_families(text: str, families: tuple[Family, ...]) -> None:
    found = flags.parse(["-localip", text]).params
    assert found is not None
    assert found.families == families


def test_doubtful_values_are_noted() -> None:
    found = flags.parse(["-localip", "1.1.1.1,1.1.1.1,fe80::1", "-corefile", "/x"]).params
    assert found is not None
    assert len(found.local_ips) == 2
    assert len(found.notes) == 3


@pytest.mark.parametrize("ask", ["-version", "--version", "-plugins", "-help", "-h"])
def test_questions_need_no_address(ask: str) -> None:
    assert flags.parse([ask]).show in ("version", "plugins", "help")


def test_usage_names_every_flag() -> None:
    lines = usage.usage().splitlines()
    for flag in flags.FLAGS:
        (line,) = (x for x in lines if x.split()[:1] == [f"-{flag.name}"])
        assert flag.boolean == (line.split() == [f"-{flag.name}"])
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for words in ("exit status: 0", "examples:\n  cni-hostport node-cache -localip"):
        assert words in text
    for flag in flags.FLAGS:
        assert all(choice in text for choice in flag.choices)


def test_the_examples_can_be_parsed() -> None:
    examples = re.findall(
        r"^  cni-hostport node-cache (.*?)(?:   .*)?$", usage.usage(), re.MULTILINE
    )
    assert len(examples) == 3
    for example in examples:
        flags.parse(example.split())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("-1.5h", -5400),
        ("1h1m1s1ms1us1ns", 3661.001001001),
        ("", None),
        ("1", None),
        ("s", None),
        ("1 s", None),
    ],
)
def test_go_durations(text: str, seconds: float | None) -> None:
    found = goflags.duration(text)
    assert found == (None if seconds is None else pytest.approx(seconds))


def test_the_manual_names_every_flag() -> None:
    manual = (Path(__file__).parents[3] / "docs" / "node-cache.md").read_text()
    assert all(f"`-{flag.name}`" in manual for flag in flags.FLAGS)
