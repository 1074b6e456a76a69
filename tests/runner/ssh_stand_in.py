"""A stand-in for OpenSSH's client: "runs" commands on hosts that are this machine with another environment.

It is started as `ssh`, with hvdrun's options. The file that SSH_STAND_IN names describes each host's
behaviour; a host that is not in it cannot be resolved. As with ssh, the command's standard input ends when
the stand-in is killed, and its exit code is the stand-in's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

TAKE_A_VALUE = ("-p", "-i")


def parse(arguments: list[str]) -> tuple[str, str]:
    """Returns the host and the command; rejects what ssh would not understand."""
    position = 0
    while arguments[position] != "--":
        assert arguments[position].startswith(("-T", "-o", *TAKE_A_VALUE)), arguments[position]
        position += 2 if arguments[position] in TAKE_A_VALUE else 1
    host, command = arguments[position + 1 :]
    return host, command


def copy(source: int, target: int, breaks_after: bytes = b"") -> None:
    """Copies bytes until the source ends, then closes the target. May exit when certain bytes come."""
    try:
        while data := os.read(source, 65536):
            if breaks_after and breaks_after in data:
                os._exit(255)
            view = memoryview(data)
            while view:
                view = view[os.write(target, view) :]
    except OSError:  # the reader is gone
        pass
    os.close(target)


def run(command: str, environment: dict[str, str], breaks_after: bytes) -> int:
    """Runs the command like a host's login shell, outside of this process's group."""
    child = subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        cwd="/",
        start_new_session=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    threading.Thread(target=copy, args=(0, os.dup(child.stdin.fileno())), daemon=True).start()
    child.stdin.close()
    output = threading.Thread(target=copy, args=(child.stdout.fileno(), os.dup(1), breaks_after), daemon=True)
    output.start()
    code = child.wait()
    output.join()
    return code if code >= 0 else 255


def main() -> int:
    host, command = parse(sys.argv[1:])
    book = Path(os.environ["SSH_STAND_IN"])
    behaviour = json.loads(book.read_text()).get(host)
    if behaviour is None:
        print(f"ssh: Could not resolve hostname {host}: Name or service not known", file=sys.stderr)
        return 255
    folder = book.parent / host
    folder.mkdir(exist_ok=True)
    (folder / "ssh.pid").write_text(f"{os.getpid()}\n")
    with (book.parent / "logins").open("a") as logins:
        logins.write(f"{os.environ.get('HOSTNAME')}>{host}\n")
    sys.stdout.write(behaviour.get("stdout", ""))
    sys.stdout.flush()
    sys.stderr.write(behaviour.get("stderr", ""))
    if behaviour.get("hangs"):
        time.sleep(300)
    if "exit_code" in behaviour:
        return int(behaviour["exit_code"])
    before, after = behaviour.get("replace", ["", ""])
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "HOSTNAME": host, "TMPDIR": str(folder)}
    environment |= behaviour.get("environment", {})
    return run(command.replace(before, after), environment, behaviour.get("breaks_after", "").encode())


if __name__ == "__main__":
    sys.exit(main())
