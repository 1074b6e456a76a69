"""A stand-in for Slurm's srun: "runs" tasks on nodes that are this machine with another environment.

It is started as `srun`, with hvdrun's options. The file that SRUN_STAND_IN names describes each node's
behaviour; a node that is not in it does not belong to the job. As Slurm does, it passes its environment on,
forwards the task's output as whole lines, or pieces of 1,024 bytes, and labels them if SLURM_LABELIO asks for
that. Its exit code is that of the task.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from ssh_stand_in import copy

OPTIONS = {
    *("--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--overlap", "--mem=0", "--cpu-bind=none"),
    *("--mpi=none", "--job-name=hvdrun"),
}
MESSAGE_BYTES = 1024


def parse(arguments: list[str]) -> tuple[str, list[str]]:
    """Returns the node and the command; rejects what srun would not understand."""
    position = arguments.index("--")
    nodes = [one.partition("=")[2] for one in arguments[:position] if one.startswith("--nodelist=")]
    assert len(nodes) == 1, arguments
    assert set(arguments[:position]) - {f"--nodelist={nodes[0]}"} == OPTIONS, arguments
    return nodes[0], arguments[position + 1 :]


def forward(source: int, label: bytes, breaks_after: bytes) -> None:
    """Passes whole lines on, as Slurm's step manager does, which waits for the rest of a shorter one."""
    held = b""
    while data := os.read(source, 65536):
        held += data
        while b"\n" in held or len(held) >= MESSAGE_BYTES:
            size = held.find(b"\n", 0, MESSAGE_BYTES) + 1 or MESSAGE_BYTES
            message, held = held[:size], held[size:]
            write(label + message)
            if breaks_after and breaks_after in message:
                os._exit(1)
    write(held)


def write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def run(command: list[str], environment: dict[str, str], behaviour: dict[str, object]) -> int:
    """Runs the task, outside of this process's group; the end of srun may leave its input open."""
    reading, writing = os.pipe()
    child = subprocess.Popen(
        command,
        stdin=reading,
        stdout=subprocess.PIPE,
        env=environment,
        cwd="/",
        start_new_session=True,
    )
    os.close(reading)
    if behaviour.get("keeps_input"):  # a process that nobody ends holds it, as Slurm's step manager may
        subprocess.Popen(["sleep", "200"], pass_fds=[writing], start_new_session=True)
    assert child.stdout is not None
    threading.Thread(target=copy, args=(0, writing), daemon=True).start()
    label = b"0: " if os.environ.get("SLURM_LABELIO", "0") != "0" else b""
    arguments = (child.stdout.fileno(), label, str(behaviour.get("breaks_after", "")).encode())
    output = threading.Thread(target=forward, args=arguments, daemon=True)
    output.start()
    code = child.wait()
    output.join()
    return code if code >= 0 else 128 - code


def main() -> int:
    node, command = parse(sys.argv[1:])
    book = Path(os.environ["SRUN_STAND_IN"])
    behaviour = json.loads(book.read_text()).get(node)
    if behaviour is None:
        print("srun: error: Unable to create step for job 7: Invalid node name specified", file=sys.stderr)
        return 1
    folder = book.parent / node
    folder.mkdir(exist_ok=True)
    (folder / "srun.json").write_text(json.dumps({"arguments": sys.argv, "environment": dict(os.environ)}))
    (folder / "srun.pid").write_text(f"{os.getpid()}\n")
    sys.stdout.write(behaviour.get("stdout", ""))
    sys.stdout.flush()
    sys.stderr.write(behaviour.get("stderr", ""))
    if behaviour.get("hangs"):
        time.sleep(300)
    if "exit_code" in behaviour:
        return int(behaviour["exit_code"])
    before, after = behaviour.get("replace", ["", ""])
    own = {"HOSTNAME": node, "TMPDIR": str(folder), "SLURMD_NODENAME": node, "SLURM_STEP_ID": "3"}
    try:
        changed = [one if not before else one.replace(before, after) for one in command]
        return run(changed, {**os.environ, **own}, behaviour)
    except FileNotFoundError as error:
        print(f"slurmstepd: error: execve(): {error.filename}: No such file or directory", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
