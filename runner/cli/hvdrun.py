"""hvdrun: turns the command line into a job, or into another action that was requested."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sirtaki.bindings._version import VERSION
from sirtaki.runner.cli.auto_command import auto_command, hash_seed
from sirtaki.runner.cli.command import find_program
from sirtaki.runner.cli.elastic_options import is_elastic
from sirtaki.runner.cli.options import EXAMPLE, parse
from sirtaki.runner.doctor.facts import FRAMEWORKS, FrameworkFacts
from sirtaki.runner.doctor.trials import find_gpu_libraries, try_adapter, try_core, try_memory
from sirtaki.runner.hosts.coding import LINES
from sirtaki.runner.hosts.host_connection import with_slot_counts
from sirtaki.runner.hosts.own_host import with_own_host
from sirtaki.runner.hosts.ssh import AGENT_WORDS, explain_agent
from sirtaki.runner.launch.allocation import IN_SLURM, find_allocation
from sirtaki.runner.launch.cores import count_gpus, usable_cores
from sirtaki.runner.launch.environment import AS_HOROVOD, encrypts, exported
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.hosts import (
    Host,
    allocate,
    is_own_host,
    name_range,
    needed,
    parse_hostfile,
    parse_hosts,
    servers_of,
)
from sirtaki.runner.launch.job import Settings
from sirtaki.runner.rendezvous.connection.wire import printable
from sirtaki.runner.rendezvous.job import name_of
from sirtaki.runner.rendezvous.server.rendezvous_state import join_names

if TYPE_CHECKING:
    from sirtaki.runner.hosts.agent_launcher import AgentLauncher
    from sirtaki.runner.launch.job import Settings

_PREFIXES = ("SIRTAKI_", "HOROVOD_")
_READ_BY_HVDRUN = (
    *("SIRTAKI_TIMELINE", "HOROVOD_TIMELINE"),
    *("SIRTAKI_NETWORK_INTERFACES", "SIRTAKI_FULL_TRACEBACKS", AS_HOROVOD),
)
_KEY_THROUGH_SLURM = (
    "the ranks encrypt their connections, but their key goes to other nodes through Slurm, whose own "
    "connections are encrypted only if its administrator has set that up"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs hvdrun and returns its exit code: that of the rank that failed, or 0."""
    try:
        open_standard_streams()
        return run_options(sys.argv[1:] if arguments is None else list(arguments))
    except LaunchError as error:
        print(f"hvdrun: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def run_options(arguments: list[str], adapt: Callable[[Settings], Settings] | None = None) -> int:
    """Does what the arguments ask for; `adapt` changes the settings of a job. Raises LaunchError."""
    options, settings_of_core = parse(arguments)
    if options.version:
        from sirtaki.bindings._version import VERSION

        print(f"hvdrun (sirtaki) {VERSION}")
        return 0
    if options.check_build:
        return check_build(settings_of_core)
    _refuse_inside_a_rank()
    if not options.command:
        raise LaunchError(f"there is no command to run: add one, {EXAMPLE}")
    _refuse_without_folder()
    notices = _take_allocation(options)
    elastic = None
    if is_elastic(options):
        from sirtaki.runner.elastic.arbiter.settings import elastic_settings

        elastic = elastic_settings(options)
    settings = _settings(options, settings_of_core, [*notices, *_check_environment()])
    if adapt is not None:
        settings = adapt(settings)
    if options.dry_run:
        return show(settings)
    if elastic is not None:
        from sirtaki.runner.elastic.job import run_elastic_job

        return run_elastic_job(settings, elastic(settings.hosts))
    from sirtaki.runner.launch.job import run_job

    return run_job(settings)


def _check_environment() -> list[str]:
    """Checks variables that may be settings before ranks start; opens the core only if there are any."""
    if not any(name.startswith(_PREFIXES) and name not in _READ_BY_HVDRUN for name in os.environ):
        return []
    from sirtaki.runner.cli.knobs import check_environment

    return check_environment(os.environ)


def _settings(
    options: argparse.Namespace, settings_of_core: dict[str, str], remarks: Sequence[str]
) -> Settings:
    hosts, notices = _hosts(options)
    command, warning = _command(options, options.size or len(hosts))

    from sirtaki.runner.launch.job import Settings
    from sirtaki.runner.observe.job_timeline import JobTimeline

    timeline = _timeline_of(options)
    interfaces = [name.strip() for text in options.network_interfaces for name in text.split(",")]
    additions = {
        **settings_of_core,
        **_timeline_environment(options),
        **({"SIRTAKI_NETWORK_INTERFACES": ",".join(interfaces)} if interfaces else {}),
        **({AS_HOROVOD: "1"} if options.as_horovod else {}),
        **(hash_seed(os.environ) if options.auto else {}),
    }
    if options.launcher == "srun" and encrypts({**os.environ, **additions}):
        notices = [*notices, _KEY_THROUGH_SLURM]
    return Settings(
        hosts=hosts,
        size=options.size,
        command=command,
        start_timeout=options.start_timeout,
        output_folder=options.output_filename,
        verbose=options.verbose,
        additions=additions,
        timeline=JobTimeline(timeline) if timeline is not None else None,
        notices=tuple(filter(None, (*notices, warning, *remarks))),
        launcher=_launcher(options),
        interfaces=tuple(interfaces),
        oversubscribe=options.oversubscribe,
        torch_env=options.torch_env,
        metrics=options.metrics_port,
        dashboard=options.dashboard,
        servers=options.servers,
    )


def _launcher(options: argparse.Namespace) -> AgentLauncher:
    """Returns the program that starts the agents of other hosts. Raises LaunchError."""
    if options.launcher == "srun":
        check_inside_job(os.environ)
        for flag, value in (("port", options.ssh_port), ("identity-file", options.ssh_identity_file)):
            if value is not None:
                raise LaunchError(f"--ssh-{flag} is for ssh: leave it out, or --launcher srun")
        return SrunOptions()
    from sirtaki.runner.hosts.ssh import SshOptions

    identity = options.ssh_identity_file and options.ssh_identity_file.absolute()
    return SshOptions(options.ssh_port, identity, options.verbose)


def _take_allocation(options: argparse.Namespace) -> list[str]:
    """Sets the hosts from the batch job's allocation if the user names none; returns the notices to print."""
    if any((options.hosts, options.hostfile, options.host_discovery_script)):
        return []
    allocation = find_allocation(os.environ)
    if allocation is None:
        return []
    options.hosts = allocation.text(max(filter(None, (1, options.size, options.min_np, options.max_np))))
    return [f"the hosts are those of {allocation.name}: {options.hosts} (--hosts names others)"]


def _command(options: argparse.Namespace, size: int) -> tuple[list[str], str]:
    """Returns the command that ranks run, with the path of its program, and a warning ("" for none)."""
    if options.auto:
        return auto_command(options.command, size, os.environ)
    path, warning = find_program(options.command, size, os.environ)
    return [path, *options.command[1:]], warning


def _hosts(options: argparse.Namespace) -> tuple[list[Host], list[str]]:
    """Returns the hosts that may run ranks, this machine as "localhost", and notices for the user."""
    if options.hosts is None and options.hostfile is None:
        if options.size is None:
            raise LaunchError(f"the number of ranks is missing: give it with -np, {EXAMPLE}")
        return [Host("localhost", options.size)], []
    return named_hosts(options)


def named_hosts(options: argparse.Namespace) -> tuple[list[Host], list[str]]:
    """Returns the hosts of --hosts or --hostfile, and notices. Raises LaunchError."""
    if options.hosts is not None and options.hostfile is not None:
        raise LaunchError("--hosts and --hostfile both name the hosts: use one of them")
    notices: list[str] = []
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts)
    else:
        hosts, notices = parse_hostfile(_read(options.hostfile), str(options.hostfile))
    return with_own_host(hosts), notices


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise LaunchError(f"cannot read {path}: {error.strerror}") from None


def _timeline_of(options: argparse.Namespace) -> Path | None:
    return options.timeline_filename and options.timeline_filename.absolute()


def _timeline_environment(options: argparse.Namespace) -> dict[str, str]:
    timeline = _timeline_of(options)
    wanted = {"SIRTAKI_TIMELINE": timeline and str(timeline)}
    wanted["SIRTAKI_TIMELINE_MARK_CYCLES"] = "1" if options.timeline_mark_cycles else None
    return {name: value for name, value in wanted.items() if value}


def _refuse_without_folder() -> None:
    """Raises LaunchError if the current folder is gone: ranks start in it, and relative paths need it."""
    try:
        os.getcwd()
    except OSError as error:
        reason = f"the current folder, in which ranks start, is not there any more ({error.strerror})"
        raise LaunchError(f"{reason}: change to another one") from None


def _refuse_inside_a_rank() -> None:
    if "SIRTAKI_RANK" in os.environ and "SIRTAKI_JOB" in os.environ:
        raise LaunchError(
            f"this is rank {os.environ['SIRTAKI_RANK']} of a job that hvdrun has already started, "
            "and a rank cannot start another job: run hvdrun once, outside of the job"
        )


def open_standard_streams() -> None:
    """Opens descriptors 0, 1 and 2 if they are closed, so that no other file gets these numbers."""
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor > 2:
            os.close(descriptor)
            return


# ---- --check-build: prints what is installed here, and whether it works --------------------------------


_LAUNCHERS = {"ssh": "ranks on several hosts", "mpirun": "ranks as MPI's", "srun": "ranks as Slurm's"}


def check_build(settings_of_core: Mapping[str, str]) -> int:
    """Prints a line for each finding; returns 0, or 1 if sirtaki itself does not work here.

    The settings are environment variables, in the form in which ranks receive them.
    """
    works = True
    for name, value, is_needed in _findings({**os.environ, **settings_of_core}):
        works = works and not (is_needed and value.startswith("no:"))
        print(f"{name:<16} {value}")
    return 0 if works else 1


def _findings(environment: Mapping[str, str]) -> Iterator[tuple[str, str, bool]]:
    """Yields what was checked, the finding ("no: " and the reason), and whether it is required."""
    yield "sirtaki", VERSION, True
    yield "Python", f"{platform.python_version()} in {sys.executable}", True
    yield "system", f"{platform.system()} {platform.release()} on {platform.machine()}", True
    yield "cores, GPUs", f"{usable_cores()} usable cores, {count_gpus()} GPUs", True
    path, broken = try_core()
    yield "core", f"no: {broken}" if broken else f"works: {path}", True
    refusal = try_memory()
    sockets = "ranks of one host exchange data over sockets"
    yield "shared memory", f"no: {refusal}; {sockets}" if refusal else "works", False
    yield from ((name, value, False) for name, value in _try_gpu_libraries(environment))
    with ThreadPoolExecutor(usable_cores()) as pool:
        for adapter in pool.map(try_adapter, FRAMEWORKS):
            yield f"sirtaki.{adapter.name}", _describe_adapter(adapter), False
    for program, purpose in _LAUNCHERS.items():
        found = shutil.which(program)
        yield program, f"{found} ({purpose})" if found else "no: not on the PATH", False


def _try_gpu_libraries(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    found, error = find_gpu_libraries(environment)
    for name in ("cuda", "nccl"):
        works, _, text = found[name] if found is not None else (False, "", error)
        yield f"lib{name}", f"{'works' if works else 'no'}: {text}"


def _describe_adapter(framework: FrameworkFacts) -> str:
    if framework.state == "imports":
        return f"works with {framework.name} {framework.version}"
    return (
        f"no: {framework.text}"
        if framework.state == "absent"
        else f"no: {framework.name} {framework.version}: {framework.text}"
    )


# ---- --dry-run: shows which ranks would run where ------------------------------------------------------
# Starts nothing, contacts no host, shows no secrets.


def show(settings: Settings) -> int:
    """Prints the layout and returns hvdrun's exit code. Raises LaunchError if there are too few slots."""
    for line in describe(settings):
        print(line)
    return 0


def describe(settings: Settings) -> Iterator[str]:
    hosts = needed(settings.hosts, settings.size)
    unknown = [host.name for host in hosts if host.slots is None and not is_own_host(host.name)]
    yield from settings.notices
    yield f"command: {shlex.join(settings.command)}"
    yield f"folder: {os.getcwd()}"
    for name, value in settings.additions.items():
        yield f"setting: {name}={value}"
    if settings.torch_env:
        yield "torch's variables are set: RANK, WORLD_SIZE, MASTER_ADDR and others"
    if settings.metrics is not None:
        yield f"each host with ranks serves metrics at {settings.metrics} (--metrics-port)"
    if settings.dashboard is not None:
        yield f"this host serves a page with all ranks at {settings.dashboard} (--dashboard)"
    if any(not is_own_host(host.name) for host in hosts):
        count = len(exported(os.environ))
        way = f"through {settings.launcher.program}'s input"
        yield f"{count} of this host's environment variables are sent to other hosts, {way}"
    shares = allocate(with_slot_counts(hosts, [], count_gpus()), settings.size)
    for share in shares:
        name = share.host.name
        yield f"{name}: {name_range(share.ranks)}" + (
            " (if it has no GPUs; otherwise one rank per GPU)" if name in unknown else ""
        )
        if servers := servers_of(share, shares, settings.servers):
            yield f"{name}: {join_names(map(name_of, servers))}"
        if not is_own_host(name):
            yield f"  {shlex.join(settings.launcher.command(settings.launcher.program, name))}"


# ---- --launcher srun: agents on the nodes of a Slurm job are steps of that job -------------------------


_LOGIN = ("HOME", "USER", "LOGNAME", "SHELL")  # the same on all nodes, and not set by srun
# Variables that srun reads as options; they would change the form of the agent's output, or confine ranks.
_OPTIONS_OF_SRUN = (
    *("SLURM_LABELIO", "SLURM_UNBUFFEREDIO", "SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE"),
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_EXACT", "SLURM_EXCLUSIVE"),
)
_STEP = (
    *("--nodes=1", "--ntasks=1", "--ntasks-per-node=1"),
    *("--overlap", "--mem=0", "--cpu-bind=none"),  # one step has all that the job has on the node
    *("--mpi=none", "--job-name=hvdrun"),
)


@dataclass(frozen=True)
class SrunOptions:
    """srun as the program that starts agents (`AgentLauncher`)."""

    python: str = sys.executable

    program = "srun"
    package = "run hvdrun where Slurm's programs are"
    forwards_lines = True
    relays = False
    # The end of srun does not have to end the input of its task, so the agent cannot rely on that.
    lease_seconds = 60.0

    def command(self, path: str, host: str) -> list[str]:
        return [path, *_STEP, f"--nodelist={host}", "--", self.python, *AGENT_WORDS, LINES]

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns what srun passes on to the agent, as it does with its whole environment."""
        sent = {**exported(base), **{name: base[name] for name in _LOGIN if name in base}}
        return {name: value for name, value in sent.items() if name not in _OPTIONS_OF_SRUN}

    def trial(self, host: str) -> str:
        return shlex.join(["srun", *_STEP, f"--nodelist={host}", "hostname"])

    def explain(self, host: str, code: int, output: Sequence[str]) -> str:
        if found := explain_agent(host, code, output, self.python):
            return str(found)
        text = "\n".join(output)
        last = printable(next((line.strip() for line in reversed(output) if line.strip()), ""), 300)
        if "node name" in text or "node configuration" in text or "nodes not in" in text.lower():
            return f"{host} is not a node of this Slurm job: check the name, or ask for it in salloc ({last})"
        if "unrecognized option" in text:
            return f"hvdrun needs the srun of Slurm 20.11 or newer, which knows --overlap ({last})"
        return (
            f"srun could not start hvdrun's agent on {host} (exit code {code}): try `{self.trial(host)}`"
            + (f" ({last})" if last else "")
        )

    def explain_loss(self, code: int) -> str:
        return f"its step of the Slurm job ended (srun ended with exit code {code})"


def check_inside_job(environment: Mapping[str, str]) -> None:
    """Raises LaunchError outside of a job, where srun would ask for nodes of its own, and wait for them."""
    if IN_SLURM not in environment:
        raise LaunchError(
            f"--launcher srun starts ranks on the nodes of a Slurm job, but {IN_SLURM} is not set: run "
            "hvdrun inside of salloc or sbatch"
        )
