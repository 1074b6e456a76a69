"""A lighthouse of torchft and its replica groups of one process each: starts those again that end.

    python -m workers.torchft_launcher GROUPS SETTINGS PYTHON-ARGUMENTS...

SETTINGS is JSON, as in common.torchft_groups. SIGTERM ends the groups.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

from common.torchft_groups import LIGHTHOUSE
from torchft.coordination import LighthouseServer

POLL_SECONDS = 0.02


def start(group: int, lighthouse: str) -> subprocess.Popen[bytes]:
    settings = {
        "TORCHFT_LIGHTHOUSE": lighthouse,
        "REPLICA_GROUP_ID": str(group),
        "TORCHFT_SETTINGS": sys.argv[2],
    }
    return subprocess.Popen([sys.executable, *sys.argv[3:]], env={**os.environ, **settings})


def main() -> None:
    count, settings = int(sys.argv[1]), json.loads(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = {name: settings[name] for name in LIGHTHOUSE}
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, **chosen)
    # The server names itself by its host name, which need not be that of an address.
    address = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    groups: list[subprocess.Popen[bytes]] = []
    try:
        for group in range(count):
            groups.append(start(group, address))
        while True:
            time.sleep(POLL_SECONDS)
            for group, process in enumerate(groups):
                if process.poll() is not None:
                    print(f"group {group} has ended with {process.returncode}", flush=True)
                    groups[group] = start(group, address)
    finally:
        for process in groups:
            process.kill()
        for process in groups:
            process.wait()


if __name__ == "__main__":
    main()
