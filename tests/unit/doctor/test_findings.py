"""Findings from facts alone: those that cannot be made on this machine, and what all have."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cni_hostport import doctor as package
from cni_hostport.cli import doctor
from cni_hostport.cni_conflist import read
from cni_hostport.doctor import diagnosis
from cni_hostport.doctor.facts import Facts, HelperFacts, Others, Place
from cni_hostport.host.confdirs import ConfFile
from cni_hostport.host.ruleset import Chain, Ruleset, Tool
from cni_hostport.host.settings import Kernel, Line
from tests.unit.cli_cases import document, mapping

OURS = (
    '{"plugins":[{"type":"bridge"},\n{"type":"cni-hostport","capabilities":{"portMappings":true}}]}'
)
MODERN = Tool("1.8.9", "nf_tables")
GOOD = Facts(
    rules=Ruleset((1, 0, 6), "", MODERN, MODERN),
    kernel=Kernel(True, True, True, True, (), (6, 18)),
    conflists=(ConfFile("/etc/cni/net.d/x", OURS, read(OURS)),),
    helper=HelperFacts(document(mapping())),
    place=Place(
        plugins={"/opt/cni/bin": "ok"}, version="0.1.0", glibc_wanted=(2, 31), glibc=(2, 36)
    ),
)
ENTRY = {
    "network": "n",
    "containerID": "c" * 64,
    "namespace": "shop",
    "pod": "web",
    "ports": ["*:80/tcp"],
    "missing": ["an element"],
}


def with_(part, **changes):
    return replace(GOOD, **{part: replace(getattr(GOOD, part), **changes)})


CASES = {
    "no-rule-tool": with_("rules", nft=None, iptables=None),
    "no-nft": with_("rules", nft=None),
    "old-nft": with_("rules", nft=(0, 9, 8)),
    "kernel-nftables": with_("rules", nft_trial="Not supported"),
    "wrong-flavour": with_("rules", legacy=(Chain("ip", "nat", "KUBE-X"),)),
    "two-flavours": with_(
        "rules",
        legacy=(Chain("ip", "nat", "KUBE-X"),),
        chains=(Chain("ip", "nat", "CNI-X"),),
    ),
    "forwarding-ipv4": with_("kernel", forward4=False),
    "forwarding-ipv6": with_("kernel", forward6=False),
    "br-netfilter": with_("kernel", bridge4=None),
    "route-localnet": with_("kernel", localnet_off=(Line("/etc/sysctl.d/x", 3, "0"),)),
    "old-kernel": with_("kernel", release=(5, 4)),
    "hidden-holders": with_("kernel", release=(6, 1)),
    "forward-drop": with_("rules", legacy=(Chain("ip", "filter", "FORWARD", "forward", "DROP"),)),
    "portmap-rules": with_("rules", chains=(Chain("ip", "nat", "CNI-HOSTPORT-DNAT"),)),
    "crio-rules": with_("rules", chains=(Chain("ip", "crio-hostports", "hostports"),)),
    "crio-manager": replace(GOOD, others=Others(crio=True)),
    "podman-reserves": replace(GOOD, others=Others(podman=True)),
    "nerdctl-reserves": replace(GOOD, others=Others(nerdctl=(2, 2, 0))),
    "no-helper": replace(GOOD, helper=HelperFacts()),
    "helper-problem": with_(
        "helper", document={**document(), "helper": {**document()["helper"], "problem": "no nft"}}
    ),
    "other-version": with_("place", version="0.2.0"),
    "keeps-breaking": with_("helper", breaking=True),
    "queue": with_("helper", document=document(queue=3)),
    "differs": with_("helper", differences=[ENTRY]),
    "stale": with_("helper", dead=[ENTRY]),
    "unjudged": with_("helper", unjudged=[ENTRY]),
    "held-unmapped": with_("helper", stray=["0.0.0.0:80/tcp"]),
    "mapped-unheld": with_("helper", document=document(mapping(held="waiting"))),
    "run-dir-persistent": with_("place", run_dir_mount=("/", "ext4")),
    "damaged-record": with_("place", damaged=["a.damaged"]),
    "selinux-label": with_("place", labels=[("/opt/x", "default_t", "bin_t")]),
    "unit-not-enabled": with_("place", systemd=True, unit_enabled="disabled"),
    "glibc": with_("place", glibc=(2, 28)),
    "plugin-missing": with_("place", plugins={"/opt/cni/bin": "dangling"}),
    "reservation-conflict": replace(GOOD, conflicts=["conflict: container c has host port 80"]),
}


def of_conflist(text):
    path = "/etc/cni/net.d/x"
    try:
        file = ConfFile(path, text, read(text))
    except ValueError as error:
        file = ConfFile(path, text, None, str(error))
    return replace(GOOD, conflists=(file,))


CASES |= {
    "broken-conflist": of_conflist("{"),
    "no-capability": of_conflist(OURS.replace("true", "false")),
    "plugin-order": of_conflist(OURS.replace("bridge", "tuning")),
    "bad-option": of_conflist(OURS.replace("{}", "").replace('"cap', '"snat":"yes","cap')),
    "portmap-active": of_conflist(OURS.replace("cni-hostport", "portmap")),
    "portmap-twice": of_conflist(OURS.replace("bridge", 'bridge"},{"type":"portmap')),
}


def test_a_good_node_has_no_findings():
    assert diagnosis.diagnose(GOOD) == []
    assert doctor.show([]) == "nothing is wrong"


@pytest.mark.parametrize("finding", CASES)
def test_one_condition_is_one_finding(finding):
    found = diagnosis.diagnose(CASES[finding])
    assert [f.id for f in found] == [finding]
    (one,) = found
    assert one.text
    assert one.mend or one.level == "info"
    assert one.text in doctor.show(found)
    assert diagnosis.healthy(found) == (one.level == "info")


def test_every_finding_is_tested():
    source = "".join(p.read_text() for p in Path(package.__file__).parent.glob("*.py"))
    ids = set(re.findall(r'Finding\(\s*"([a-z0-9-]+)"', source))
    ids -= {"forwarding-"}
    assert ids | {"forwarding-ipv4", "forwarding-ipv6"} == set(CASES)


def test_every_finding_is_documented():
    text = (Path(__file__).parents[3] / "docs/doctor.md").read_text()
    assert set(re.findall(r"^\| `([a-z0-9-]+)` \|", text, re.MULTILINE)) == set(CASES)


def test_the_worst_comes_first():
    facts = replace(CASES["no-rule-tool"], conflicts=["x"], helper=HelperFacts())
    assert [f.level for f in diagnosis.diagnose(facts)] == ["error", "warning", "info"]


@pytest.mark.parametrize("setting", ['"openForward":true,"cap', '"snat":true,"cap'])
def test_open_forward_answers_a_dropping_policy(setting):
    facts = of_conflist(OURS.replace('"cap', setting))
    facts = replace(facts, rules=CASES["forward-drop"].rules)
    assert bool(diagnosis.diagnose(facts)) == ("snat" in setting)


@pytest.mark.parametrize("policy", ["no", "require"])
def test_who_reserves_nothing_minds_no_reservation(policy):
    facts = of_conflist(OURS.replace('"cap', f'"reservePorts":"{policy}","cap'))
    facts = replace(facts, others=Others(podman=True, nerdctl=(2, 1, 6)))
    assert bool(diagnosis.diagnose(facts)) == (policy == "require")


def test_podman_told_not_to_reserve_is_fine():
    conf = {"enable_port_reservation": Line("/etc/containers/containers.conf", 2, "false")}
    assert diagnosis.diagnose(replace(GOOD, others=Others(podman=True, podman_conf=conf))) == []


def test_many_of_a_kind_are_a_few_lines():
    facts = with_("helper", dead=[ENTRY] * 100)
    assert len(diagnosis.diagnose(facts)) == 5
