"""Entry point of ``python -m cni_hostport`` and of the bundle's helper executable.

Cleans the environment of what the boot loader left there, then dispatches: with
arguments to ``cli.main``, without to the plugin call.
"""

import os
import sys

from cni_hostport import shim
from cni_hostport.host.environment import drop_boot_loader_names


def main() -> int:
    """Run what the command line names and return the exit status."""
    drop_boot_loader_names(os.environb)
    if len(sys.argv) < 2 and os.environb.get(b"CNI_COMMAND"):
        shim.main()
    shim.open_standard_descriptors()
    from cni_hostport.cli.main import main as dispatch

    return dispatch(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
