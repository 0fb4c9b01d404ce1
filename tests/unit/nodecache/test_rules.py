"""The rule table (facts a4, b7), and what is done about rules found in the kernel."""

import pytest

from cni_hostport.model import Family
from cni_hostport.netfilter import restore
from cni_hostport.nodecache import flags, nftrules, rules


def ruleset(text: str, **more: object) -> rules.RuleSet:
    ips, _ = flags.parse_local_ips(text)
    return rules.RuleSet(ips, 53, 8080, **more)  # type: ignore[arg-type]


def test_the_twelve_rules_in_upstreams_order() -> None:
    found = rules.listed(ruleset("169.254.20.10", socket_match=False), Family.V4)
    c1, c2 = rules.SKIP, rules.ALLOW
    want = [
        ("raw", "PREROUTING", "-p tcp -d IP --dport 53", "NOTRACK", c1),
        ("raw", "PREROUTING", "-p udp -d IP --dport 53", "NOTRACK", c1),
        ("filter", "INPUT", "-p tcp -d IP --dport 53", "ACCEPT", c2),
        ("filter", "INPUT", "-p udp -d IP --dport 53", "ACCEPT", c2),
        ("raw", "OUTPUT", "-p tcp -s IP --sport 53", "NOTRACK", c1),
        ("raw", "OUTPUT", "-p udp -s IP --sport 53", "NOTRACK", c1),
        ("filter", "OUTPUT", "-p tcp -s IP --sport 53", "ACCEPT", c2),
        ("filter", "OUTPUT", "-p udp -s IP --sport 53", "ACCEPT", c2),
        ("raw", "OUTPUT", "-p tcp -d IP --dport 53", "NOTRACK", c1),
        ("raw", "OUTPUT", "-p udp -d IP --dport 53", "NOTRACK", c1),
        ("raw", "OUTPUT", "-p tcp -d IP --dport 8080", "NOTRACK", c1),
        ("raw", "OUTPUT", "-p tcp -s IP --sport 8080", "NOTRACK", c1),
    ]
    assert [tuple(rule) for rule in found] == [
        (
            table,
            chain,
            (
                *match.replace("IP", "169.254.20.10").split(),
                "-j",
                target,
                "-m",
                "comment",
                "--comment",
                comment,
            ),
        )
        for table, chain, match, target, comment in want
    ]


@pytest.mark.parametrize(
    ("text", "v4", "v6"),
    [
        ("169.254.20.10,10.0.0.10", 24, 0),
        ("fd00:1:2:3::5", 0, 12),
        ("169.254.20.10,fd00:1:2:3::5", 12, 12),
    ],
)
def test_rules_go_to_their_family(text: str, v4: int, v6: int) -> None:
    four = rules.listed(ruleset(text), Family.V4)
    six = rules.listed(ruleset(text), Family.V6)
    assert (len(four), len(six)) == (v4, v6)
    assert not any(":" in word for rule in four for word in rule.args[3:4])
    assert all(":" in rule.args[3] for rule in six)


def test_socket_match_only_on_prerouting() -> None:
    for rule in rules.listed(ruleset("169.254.20.10"), Family.V4):
        assert ("socket" in rule.args) == (rule.chain == "PREROUTING")


def kernel(
    *lines: str, table: str = "raw", chains: str = "PREROUTING OUTPUT"
) -> dict[str, restore.Table]:
    text = f"*{table}\n" + "".join(f":{c} ACCEPT [0:0]\n" for c in chains.split() if c.isupper())
    text += "".join(f":{c} - [0:0]\n" for c in chains.split() if not c.isupper())
    return restore.parse_save(text + "".join(f"{line}\n" for line in lines) + "COMMIT\n")


def installed(
    wanted: rules.RuleSet, *, above: str = "", below: str = ""
) -> dict[str, restore.Table]:
    """The four chains as the kernel shows them after set-up."""
    found: dict[str, restore.Table] = {}
    for table in ("raw", "filter"):
        lines = []
        for chain in [c for t, c in rules.CHAINS if t == table]:
            lines += [
                line for line in above.splitlines() if f" {chain} " in line and table == "raw"
            ]
            mine = [
                r for r in rules.listed(wanted, Family.V4) if (r.table, r.chain) == (table, chain)
            ]
            lines += ["-A " + restore.join((chain, *rule.args)) for rule in reversed(mine)]
            lines += [
                line for line in below.splitlines() if f" {chain} " in line and table == "raw"
            ]
        found |= kernel(*lines, table=table, chains="PREROUTING INPUT OUTPUT other")
    return found


WANTED = ruleset("169.254.20.10,10.0.0.10")
LIST = rules.listed(WANTED, Family.V4)


def test_nothing_to_do_where_all_is_well() -> None:
    assert rules.plan(installed(WANTED), LIST) == ()
    harmless = (
        "-A PREROUTING -i lo -j LOG\n-A PREROUTING -p tcp -m tcp --dport 80 -j ACCEPT\n"
        "-A PREROUTING -d 10.1.0.0/16 -j ACCEPT\n-A OUTPUT -j other"
    )
    assert rules.plan(installed(WANTED, above=harmless), LIST) == ()


@pytest.mark.parametrize(
    "intruder",
    [
        "-A PREROUTING -j ACCEPT",
        "-A PREROUTING -p tcp -j ACCEPT",
        "-A PREROUTING -d 10.0.0.0/8 -p udp -m udp --dport 1:1024 -j ACCEPT",
        "-A PREROUTING -m mark --mark 0x1 -j DROP",
        "-A OUTPUT -d 169.254.20.10/32 -j RETURN",
    ],
)
def test_a_rule_slipped_above_ours_is_noticed(intruder: str) -> None:
    repairs = rules.plan(installed(WANTED, above=intruder), LIST)
    assert [(r.chain, r.why) for r in repairs] == [(intruder.split()[1], "misplaced")]
    assert rules.plan(installed(WANTED, below=intruder), LIST) == ()


def test_a_jump_counts_by_what_stands_behind_it() -> None:
    tables = installed(WANTED, above="-A PREROUTING -j other")
    assert rules.plan(tables, LIST) == ()
    other = restore.Chain("other", None, (restore.Rule(("-p", "udp", "-j", "ACCEPT")),))
    raw = tables["raw"]
    tables["raw"] = restore.Table("raw", {**raw.chains, "other": other})
    assert [r.why for r in rules.plan(tables, LIST)] == ["misplaced"]


def test_accept_above_an_accept_is_no_damage() -> None:
    tables = installed(WANTED)
    chain = tables["filter"].chains["INPUT"]
    for target, damage in (("ACCEPT", 0), ("DROP", 1)):
        moved = restore.Chain("INPUT", "DROP", (restore.Rule(("-j", target)), *chain.rules))
        filt = restore.Table("filter", {**tables["filter"].chains, "INPUT": moved})
        assert len(rules.plan({**tables, "filter": filt}, LIST)) == damage


def test_missing_doubled_and_stale_rules_are_mended_by_comment() -> None:
    tables = installed(WANTED)
    pre = tables["raw"].chains["PREROUTING"].rules
    foreign = restore.Rule(("-p", "udp", "-d", "1.1.1.1", "--dport", "53", "-j", "NOTRACK"))
    old = restore.Rule(("-p", "udp", "-d", "9.9.9.9", "-j", "NOTRACK", "--comment", rules.SKIP))
    for chain, why in (
        ((*pre[1:], foreign), "missing"),
        ((*pre, pre[0], foreign), "doubled"),
        ((*pre, old, foreign), "stale"),
        ((pre[1], pre[0], *pre[2:], foreign), "misplaced"),
    ):
        raw = restore.Table(
            "raw",
            {**tables["raw"].chains, "PREROUTING": restore.Chain("PREROUTING", "ACCEPT", chain)},
        )
        (repair,) = rules.plan({**tables, "raw": raw}, LIST)
        assert repair.why == why
        assert set(repair.delete) == {r.args for r in chain if r is not foreign}
        assert len(repair.insert) == 4


def test_setup_writes_filter_first_teardown_raw_first() -> None:
    setup = rules.render(rules.blind_setup(LIST), rules.SETUP_ORDER)
    teardown = rules.render(rules.blind_teardown(LIST), rules.TEARDOWN_ORDER)
    assert setup.index("*filter") < setup.index("*raw")
    assert teardown.index("*raw") < teardown.index("*filter")
    assert setup.count("\n-I ") == teardown.count("\n-D ") == 24


def test_clean_takes_our_comment_wherever_it_stands() -> None:
    mine = f'-A other -p udp -m comment --comment "{rules.SKIP}" -j NOTRACK'
    tables = kernel(mine, "-A PREROUTING -j NOTRACK", chains="PREROUTING other")
    (repair,) = rules.clean(tables)
    assert (repair.chain, len(repair.delete)) == ("other", 1)


def test_accepthealth_adds_both_directions_and_is_off_by_default() -> None:
    more = rules.listed(ruleset("169.254.20.10", accept_health=True), Family.V4)
    extra = [r for r in more if r.table == "filter" and "8080" in r.args]
    assert len(more) == 20
    assert {(r.chain, r.args[2]) for r in extra} == {
        ("INPUT", "-d"),
        ("INPUT", "-s"),
        ("OUTPUT", "-d"),
        ("OUTPUT", "-s"),
    }


def test_nftables_holds_the_same_rules() -> None:
    both = ruleset("169.254.20.10,fd00::5")
    text = nftrules.body(both)
    assert text.count("notrack") == 16
    assert text.count(" accept comment") == 8
    assert text.count("socket transparent") == 4
    assert "ip6 daddr fd00::5 tcp dport 8080 notrack" in text
    assert "socket" not in nftrules.body(ruleset("1.1.1.1", socket_match=False))
    assert nftrules.setup(both).startswith(nftrules.teardown())
