"""Entry point of ``python -m cni_hostport`` and of the bundle's helper executable.

Learns where the bundle is, cleans the environment of what its front or boot loader left
there, then dispatches: with arguments to ``cli.main``, without to the plugin call.
"""

import os
import sys

from cni_hostport import shim
from cni_hostport.host.environment import drop_boot_loader_names


def find_bundle() -> None:
    """Say in ``sys.bundle`` and ``sys.executable`` what ``shim.bundle`` goes by.

    Python is ``<bundle>/_internal/cni-hostport-helper``, or the executable in front of that.
    """
    folder, name = os.path.split(sys.executable)
    if name != shim.HELPER:
        return
    if os.path.basename(folder) == "_internal":
        folder = os.path.dirname(folder)
        sys.executable = os.path.join(folder, name)
        sys.path[:] = filter(os.path.isdir, sys.path)
    sys.bundle = folder  # type: ignore[attr-defined]


def main() -> int:
    """Run what the command line names and return the exit status."""
    find_bundle()
    drop_boot_loader_names(os.environb)
    if len(sys.argv) < 2 and os.environb.get(b"CNI_COMMAND"):
        shim.main()
    shim.open_standard_descriptors()
    from cni_hostport.cli.main import main as dispatch

    return dispatch(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
