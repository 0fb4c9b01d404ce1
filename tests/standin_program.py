"""The whole program with the stand-in in the helper's place: plugin call, slow path, helper."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cni_hostport import shim

shim.program = lambda: [sys.executable, "-I", os.path.abspath(__file__)]

if sys.argv[1:] == ["helper"]:
    from tests import standin

    sys.exit(standin.main())
elif len(sys.argv) > 1:
    from cni_hostport.cli.main import main

    sys.exit(main(sys.argv[1:]))
else:
    shim.main()
