"""Python source compiled into a C array, for the plugin executable.

    python3 packaging/freeze.py cni_hostport/shim.py shim > frozen.h

Without docstrings and without a path of this machine. Run it by the Python whose library the
executable is linked with: code objects are that version's.
"""

import marshal
import sys
from pathlib import Path


def frozen(source: Path, name: str) -> str:
    """C text that defines the code of ``source`` as ``name``."""
    code = compile(source.read_bytes(), f"{source.stem}.py", "exec", dont_inherit=True, optimize=2)
    data = marshal.dumps(code)
    lines = [
        "    " + ", ".join(str(byte) for byte in data[at : at + 20]) + ","
        for at in range(0, len(data), 20)
    ]
    return "\n".join([f"static const unsigned char {name}[] = {{", *lines, "};", ""])


if __name__ == "__main__":
    sys.stdout.write(frozen(Path(sys.argv[1]), sys.argv[2]))
