"""Corefile rendering against upstream's vectors (facts b1, b2), and what upstream leaves broken."""

import pytest

from cni_hostport.nodecache import corefile
from cni_hostport.nodecache.kubedns import KubeDNSConfig

TEMPLATE = """cluster.local:53 {
    errors
    cache {
            success 9984 30
            denial 9984 5
    }
    reload
    loop
    bind __PILLAR__LOCAL__DNS__
    forward . __PILLAR__CLUSTER__DNS__ {
            force_tcp
    }
    prometheus :9253
    }
.:53 {
    errors
    cache 30
    reload
    loop
    bind __PILLAR__LOCAL__DNS__ __PILLAR__DNS__SERVER__
    forward . __PILLAR__UPSTREAM__SERVERS__ {
            force_tcp
    }
    prometheus :9253
    }
"""
UDP_TAIL = """    forward . {servers}
    prometheus :9253
    }}
"""


def settings(*ips: str, cluster: str | None = "9.10.11.12") -> corefile.Settings:
    return corefile.Settings(ips, 53, cluster, "test-svc", ":9253")


CASES = {
    "ipv4": (
        ("169.254.20.10", "10.0.0.10"),
        "9.10.11.12",
        {
            "acme.local": ("1.1.1.1",),
            "google.local": ("8.8.8.8",),
            "widget.local": ("2.2.2.2:10053", "3.3.3.3"),
        },
        ("2.2.2.2:10053", "3.3.3.3"),
    ),
    "ipv6": (
        ("fe80:169:254::1", "fd00:1:2:3::5"),
        "2001:db8::1",
        {
            "acme.local": ("2001:db8:1:1:1::1",),
            "google.local": ("2001:4860:4860::8888",),
            "widget.local": ("[2001:db8:2:2:2::2]:10053", "2001:db8:3:3:3::3"),
        },
        ("[2001:db8:2:2:2::2]:10053", "2001:db8:3:3:3::3"),
    ),
}


def expected_plain(ips: tuple[str, ...], cluster: str, template: str = TEMPLATE) -> str:
    joined = " ".join(ips)
    return (
        template.replace("__PILLAR__LOCAL__DNS__ __PILLAR__DNS__SERVER__", joined + " ")
        .replace("__PILLAR__LOCAL__DNS__", joined)
        .replace("__PILLAR__CLUSTER__DNS__", cluster)
        .replace("__PILLAR__UPSTREAM__SERVERS__", "/etc/resolv.conf")
    )


@pytest.mark.parametrize("case", CASES)
def test_vector_1_and_2_no_configmap(case: str) -> None:
    ips, cluster, _, _ = CASES[case]
    found = corefile.render(TEMPLATE, KubeDNSConfig(), settings(*ips, cluster=cluster))
    assert found.text == expected_plain(ips, cluster)
    assert "PILLAR" not in found.text
    assert f"bind {' '.join(ips)} \n" in found.text  # the trailing blank is upstream's
    changed = TEMPLATE.replace("loop", "template")
    again = corefile.render(changed, KubeDNSConfig(), settings(*ips, cluster=cluster))
    assert again.text == expected_plain(ips, cluster, changed)


@pytest.mark.parametrize("case", CASES)
def test_vector_3_stub_domains_and_upstreams(case: str) -> None:
    ips, cluster, stubs, upstreams = CASES[case]
    config = KubeDNSConfig(tuple(sorted(stubs.items())), upstreams)
    found = corefile.render(TEMPLATE, config, settings(*ips, cluster=cluster))
    head = expected_plain(ips, cluster).replace(
        "    forward . /etc/resolv.conf {\n            force_tcp\n    }\n",
        f"    forward . {' '.join(upstreams)}\n",
    )
    blocks = "".join(
        f"\n{domain}:53 {{\n    errors\n    cache 30\n    bind {' '.join(ips)}\n"
        f"    forward . {' '.join(servers)}\n}}\n"
        for domain, servers in stubs.items()
    )
    assert found.text == head + blocks
    assert found.notes == ()


@pytest.mark.parametrize("placeholder", corefile.PROMETHEUS)
def test_vector_4_prometheus_placeholder(placeholder: str) -> None:
    template = TEMPLATE.replace(":9253", placeholder)
    found = corefile.render(template, KubeDNSConfig(), settings("169.254.20.10", "10.0.0.10"))
    assert found.text == expected_plain(("169.254.20.10", "10.0.0.10"), "9.10.11.12")


def test_other_indentation_keeps_tcp_and_says_so() -> None:
    template = TEMPLATE.replace("            force_tcp", "        force_tcp")
    config = KubeDNSConfig((), ("1.1.1.1",))
    found = corefile.render(template, config, settings("169.254.20.10"))
    assert "forward . 1.1.1.1 {\n        force_tcp" in found.text
    assert "TCP is kept" in found.notes[0]


def test_a_missing_service_is_an_error_not_nil() -> None:
    with pytest.raises(corefile.ServiceUnknown, match="TEST_SVC_SERVICE_HOST"):
        corefile.render(TEMPLATE, KubeDNSConfig(), settings("1.1.1.1", cluster=None))
    plain = ".:53 {\n    forward . 1.2.3.4\n}\n"
    assert corefile.render(plain, KubeDNSConfig(), settings("1.1.1.1", cluster=None)).text == plain


def test_a_stub_domain_that_the_template_serves_is_left_out() -> None:
    config = KubeDNSConfig((("cluster.local", ("1.1.1.1",)), ("other.local", ("1.1.1.1",))))
    found = corefile.render(TEMPLATE, config, settings("169.254.20.10"))
    assert "cluster.local" in found.notes[0]
    assert found.text.count("cluster.local:53") == 1
    assert "\nother.local:53 {" in found.text


def test_service_variable() -> None:
    assert corefile.service_variable("kube-dns-upstream") == "KUBE_DNS_UPSTREAM_SERVICE_HOST"
