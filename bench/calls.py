"""One CNI call as every plugin here gets it: environment and stdin, and nothing else.

The same words for all, as containerd would pass them for a pod on a bridge: what differs is
the plugin's type and its ``backend`` key.
"""

import json

BRIDGE, GATEWAY4, GATEWAY6 = "cni0", "10.1.0.1", "fd00:1::1"
POD, POD4, POD6 = "pod", "10.1.0.2", "fd00:1::2"
NETWORK, IFNAME = "podnet", "eth0"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MAC = "aa:bb:cc:dd:ee:ff"


def container_id(number):
    """64 hexadecimal digits, as runtimes make them."""
    return f"{number:064x}"


def other_address(number):
    """Pod addresses of one of the others; .2 is the pod that is really there."""
    return f"10.1.{1 + number // 250}.{number % 250 + 3}", f"fd00:1::1:{number + 3:x}"


def mappings(first, count=1, target=80, protocol="tcp"):
    """``count`` ports from ``first`` on, as ``runtimeConfig`` has them."""
    return [
        {"hostPort": first + i, "containerPort": target + i, "protocol": protocol}
        for i in range(count)
    ]


def call(
    verb, number, ports, *, plugin, backend=None, dual=False, addresses=(POD4, POD6), netns=POD
):
    """(environment, stdin) of one call."""
    env = {
        "PATH": PATH,
        "CNI_COMMAND": verb,
        "CNI_CONTAINERID": container_id(number),
        "CNI_NETNS": f"/run/netns/{netns}",
        "CNI_IFNAME": IFNAME,
        "CNI_ARGS": f"IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-{number}",
        "CNI_PATH": "/opt/cni/bin",
    }
    ips = [{"address": f"{addresses[0]}/16", "gateway": GATEWAY4, "interface": 2}]
    if dual:
        ips.append({"address": f"{addresses[1]}/64", "gateway": GATEWAY6, "interface": 2})
    config = {
        "cniVersion": "1.0.0",
        "name": NETWORK,
        "type": plugin,
        "capabilities": {"portMappings": True},
        "runtimeConfig": {"portMappings": ports},
        "prevResult": {
            "cniVersion": "1.0.0",
            "interfaces": [
                {"name": BRIDGE, "mac": MAC},
                {"name": "veth0", "mac": MAC},
                {"name": IFNAME, "mac": MAC, "sandbox": env["CNI_NETNS"]},
            ],
            "ips": ips,
            "routes": [{"dst": "0.0.0.0/0"}],
            "dns": {},
        },
    }
    if backend:
        config["backend"] = backend
    return env, json.dumps(config)
