"""hvdrun: turns the command line into a job, or into another action that was requested."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sirtaki.runner.cli.command import find_program
from sirtaki.runner.cli.options import EXAMPLE, is_elastic, parse
from sirtaki.runner.launch.environment import AS_HOROVOD, encrypts
from sirtaki.runner.launch.errors import LaunchError, explained
from sirtaki.runner.launch.hosts import Host, find_allocation, parse_hostfile, parse_hosts

if TYPE_CHECKING:
    from sirtaki.runner.hosts.agent_launcher import AgentLauncher
    from sirtaki.runner.launch.starter import Settings
    from sirtaki.runner.observe.timeline import JobTimeline

_PREFIXES = ("SIRTAKI_", "HOROVOD_")
_READ_BY_HVDRUN = (
    *("SIRTAKI_TIMELINE", "HOROVOD_TIMELINE"),
    *("SIRTAKI_NETWORK_INTERFACES", "SIRTAKI_FULL_TRACEBACKS", "SIRTAKI_AS", AS_HOROVOD),
)
# For --debug-rank: all ranks wait for the rank that is stopped at a breakpoint.
_NO_DEADLINES = {
    "SIRTAKI_STALL_REPORT": "1e6",
    "SIRTAKI_STALL_DEADLINE": "0",
    "SIRTAKI_PROGRESS_DEADLINE": "1e7",
    "SIRTAKI_HEARTBEAT": "0",
}
_DEBUG_SECONDS = 1e6  # for all ranks to come to hvd.init()
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
        from sirtaki.runner.doctor.gathering import check_build

        return check_build(settings_of_core)
    _refuse_inside_a_rank()
    if not options.command:
        raise LaunchError(f"there is no command to run: add one, {EXAMPLE}")
    _refuse_without_folder()
    notices = _take_allocation(options)
    elastic = None
    if is_elastic(options):
        from sirtaki.runner.elastic.settings import elastic_settings

        elastic = elastic_settings(options)
    settings = _settings(options, settings_of_core, [*notices, *_check_environment()])
    if adapt is not None:
        settings = adapt(settings)
    if options.dry_run:
        from sirtaki.runner.launch.job import show_layout

        return show_layout(settings)
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

    from sirtaki.bindings.bootstrap.job import DEBUGGED
    from sirtaki.runner.launch.starter import Settings

    timeline = _timeline(options)
    interfaces = [name.strip() for text in options.network_interfaces for name in text.split(",")]
    additions = {
        **({} if options.debug_rank is None else _NO_DEADLINES),
        **settings_of_core,
        **({DEBUGGED: f"{options.debug_rank}:{options.debug_port}"} if options.debug_port else {}),
        **_timeline_environment(timeline, options),
        **({"SIRTAKI_NETWORK_INTERFACES": ",".join(interfaces)} if interfaces else {}),
        **({AS_HOROVOD: "1"} if options.as_horovod else {}),
        **({"SIRTAKI_AS": "gloo"} if options.as_gloo else {}),
        **_hash_seed(options),
    }
    if options.launcher == "srun" and encrypts({**os.environ, **additions}):
        notices = [*notices, _KEY_THROUGH_SLURM]
    return Settings(
        hosts=hosts,
        size=options.size,
        command=command,
        start_timeout=options.start_timeout if options.debug_rank is None else _DEBUG_SECONDS,
        output_folder=options.output_filename,
        verbose=options.verbose,
        additions=additions,
        timeline=timeline,
        notices=tuple(filter(None, (*notices, warning, *remarks))),
        launcher=_launcher(options),
        interfaces=tuple(interfaces),
        oversubscribe=options.oversubscribe,
        torch_env=options.torch_env or options.as_gloo,
        metrics=options.metrics_port,
        dashboard=options.dashboard,
        servers=options.servers,
        debug_rank=options.debug_rank,
        debug_port=options.debug_port,
    )


def _launcher(options: argparse.Namespace) -> Callable[[], AgentLauncher]:
    """Returns what returns the launcher of the agents of other hosts. Raises LaunchError."""
    if options.launcher == "srun":
        from sirtaki.runner.hosts.agent_launcher import SrunOptions, check_inside_job

        check_inside_job(os.environ)
        for flag, value in (("port", options.ssh_port), ("identity-file", options.ssh_identity_file)):
            if value is not None:
                raise LaunchError(f"--ssh-{flag} is for ssh: leave it out, or --launcher srun")
        return SrunOptions
    from sirtaki.runner.launch.starter import ssh_launcher

    identity = options.ssh_identity_file and options.ssh_identity_file.absolute()
    return partial(ssh_launcher, options.ssh_port, identity, options.verbose)


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
        from sirtaki.runner.cli.auto_command import auto_command

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
    from sirtaki.runner.hosts.own_host import with_own_host

    notices: list[str] = []
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts)
    else:
        hosts, notices = parse_hostfile(_read(options.hostfile), str(options.hostfile))
    return with_own_host(hosts), notices


def _read(path: Path) -> str:
    with explained(f"cannot read {path}"):
        return path.read_text(errors="replace")


def _hash_seed(options: argparse.Namespace) -> dict[str, str]:
    if not options.auto:
        return {}
    from sirtaki.runner.cli.auto_command import hash_seed

    return hash_seed(os.environ)


def _timeline(options: argparse.Namespace) -> JobTimeline | None:
    if options.timeline_filename is None:
        return None
    from sirtaki.runner.observe.timeline import JobTimeline

    return JobTimeline(options.timeline_filename.absolute())


def _timeline_environment(timeline: JobTimeline | None, options: argparse.Namespace) -> dict[str, str]:
    found = {} if timeline is None else {"SIRTAKI_TIMELINE": str(timeline.path)}
    return found | ({"SIRTAKI_TIMELINE_MARK_CYCLES": "1"} if options.timeline_mark_cycles else {})


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
