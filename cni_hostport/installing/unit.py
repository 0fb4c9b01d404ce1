"""The helper's systemd unit as ``install`` writes it; packaging/ holds the same for packagers.

Decides nothing but the program's path. A test compares both texts.
"""

NAME = "cni-hostport.service"
FOLDER = "/etc/systemd/system"

TEXT = """\
# The node's helper as a service: restarted when it dies, and its sockets kept by systemd
# meanwhile, so that no host port is free for an instant.
#
# Nothing here may give it a mount namespace of its own (ProtectSystem=, PrivateTmp=,
# ProtectKernelTunables= and the like): it must see /run/netns as the container runtimes
# do, or it could not tell whether an attachment's namespace still lives.

[Unit]
Description=Host ports of containers (cni-hostport)
Documentation=https://www.cni.dev/
# After what loads a whole ruleset and empties the old one, before what starts containers.
After=network-pre.target nftables.service netfilter-persistent.service firewalld.service
Before=containerd.service crio.service kubelet.service k3s.service podman-restart.service

# Never give up: calls start a helper by themselves, but its sockets live here.
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
ExecStart=@PROGRAM@ helper --replace
Restart=always
RestartSec=1s
# TERM to the helper alone: an nft that it is waiting for may finish its transaction.
KillMode=mixed
TimeoutStopSec=10s

# One or more sockets a mapping and family.
FileDescriptorStoreMax=65536
LimitNOFILE=1048576
OOMScoreAdjust=-900

# Records and queue outlive the service; a reboot empties /run, rules and records alike.
RuntimeDirectory=cni-hostport
RuntimeDirectoryMode=0700
RuntimeDirectoryPreserve=yes
UMask=0077

NoNewPrivileges=yes
# NET_ADMIN rules, links, conntrack; NET_BIND_SERVICE ports below 1024; SYS_ADMIN setns(2) into
# a pod's namespace; SYS_PTRACE and DAC_READ_SEARCH the owner of a port in /proc; SYS_MODULE
# iptables-legacy loads its modules itself; SYS_RESOURCE limits; KILL --replace.
CapabilityBoundingSet=CAP_NET_ADMIN CAP_NET_RAW CAP_NET_BIND_SERVICE CAP_SYS_ADMIN CAP_SYS_PTRACE
CapabilityBoundingSet=CAP_DAC_READ_SEARCH CAP_DAC_OVERRIDE CAP_SYS_MODULE CAP_SYS_RESOURCE CAP_KILL
RestrictNamespaces=net
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
SystemCallFilter=@system-service @module
SystemCallErrorNumber=EPERM
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes

[Install]
WantedBy=multi-user.target
"""


def text(program: str) -> str:
    """The unit that runs this program."""
    return TEXT.replace("@PROGRAM@", program)
