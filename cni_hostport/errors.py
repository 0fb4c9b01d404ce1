"""The one exception tree of the project.

Every failure that a caller of the plugin may see is a subclass of
``HostPortError``; the class decides the CNI error code, the instance carries
the words. This file never formats a reply (``cni.py`` does) and never logs.

Codes 0 to 99 are the CNI specification's ("Error" section, well-known codes);
100 and above are this plugin's own.
"""

from __future__ import annotations

from typing import ClassVar


class HostPortError(Exception):
    """Base of every error the plugin reports.

    ``msg`` is one sentence for a human: what happened, to which field, port or
    pod. ``details`` says why and what to do next; it may be empty.
    """

    code: ClassVar[int] = 999

    def __init__(self, msg: str, details: str = "") -> None:
        super().__init__(msg if not details else f"{msg}: {details}")
        self.msg = msg
        self.details = details


class IncompatibleVersion(HostPortError):
    """CNI code 1: the configuration's ``cniVersion`` is not one we speak."""

    code: ClassVar[int] = 1


class UnknownContainer(HostPortError):
    """CNI code 3: CHECK of an attachment that was never added."""

    code: ClassVar[int] = 3


class BadEnvironment(HostPortError):
    """CNI code 4: a CNI_* variable is missing or malformed."""

    code: ClassVar[int] = 4


class IOFailure(HostPortError):
    """CNI code 5: stdin or the run directory cannot be read or written."""

    code: ClassVar[int] = 5


class DecodeFailure(HostPortError):
    """CNI code 6: stdin is no JSON object, or a field has the wrong type."""

    code: ClassVar[int] = 6


class InvalidConfig(HostPortError):
    """CNI code 7: a field of the network configuration has an impossible value."""

    code: ClassVar[int] = 7


class InvalidNetns(HostPortError):
    """CNI code 8: CNI_NETNS is the namespace the plugin itself runs in."""

    code: ClassVar[int] = 8


class TryAgain(HostPortError):
    """CNI code 11: a passing condition (helper starting, lock held, no descriptors)."""

    code: ClassVar[int] = 11


class NotAvailable(HostPortError):
    """CNI code 50: STATUS says that ADD cannot be served."""

    code: ClassVar[int] = 50


class PortInUse(HostPortError):
    """Code 101: somebody else has the host port; the text names the owner.

    ``owner`` says of what kind: ``attachment`` (another pod) or ``process``.
    """

    code: ClassVar[int] = 101

    def __init__(self, msg: str, details: str = "", owner: str = "process") -> None:
        super().__init__(msg, details)
        self.owner = owner


class NetfilterFailed(HostPortError):
    """Code 102: the kernel or the rule tool refused a change; nothing was changed."""

    code: ClassVar[int] = 102


class StateDiffers(HostPortError):
    """Code 103: CHECK found something missing; the text names what."""

    code: ClassVar[int] = 103
