"""Starts ranks on hosts that are network namespaces, without a launcher: each reads its place from its
environment.

    python start.py ADDRESS KEY_FILE RANKS_EACH NAME/NAMESPACE/INTERFACE … -- COMMAND

Starts RANKS_EACH ranks of a command on each host, and ends when they have ended.
"""

from __future__ import annotations

import os
import subprocess
import sys


def main() -> None:
    split = sys.argv.index("--")
    address, key_file, ranks_each, *hosts = sys.argv[1:split]
    size = len(hosts) * int(ranks_each)
    ranks = []
    for rank in range(size):
        name, namespace, interface = hosts[rank // int(ranks_each)].split("/")
        variables = {
            "SIRTAKI_RANK": str(rank),
            "SIRTAKI_SIZE": str(size),
            "SIRTAKI_RENDEZVOUS": address,
            "SIRTAKI_KEY_FILE": key_file,
            "GLOO_SOCKET_IFNAME": interface,
        }
        within = f'hostname {name} && exec "$@"'
        prefix = ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", within, "sh"]
        command = [*prefix, *sys.argv[split + 1 :]]
        ranks.append(subprocess.Popen(command, env={**os.environ, **variables}))
    sys.exit(max([rank.wait() for rank in ranks]))


if __name__ == "__main__":
    main()
