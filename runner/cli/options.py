"""The options that hvdrun takes on its command line, and in a file with --config-file."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sirtaki.runner.launch.errors import LaunchError, explained

USAGE = "hvdrun -np N [-H HOST:SLOTS,…] [options] command [arguments]"
EXAMPLE = "for example: hvdrun -np 2 python train.py"
DASHBOARD = "--dashboard"
_ANY_PORT = "0"
_ELASTIC = ("min_np", "max_np", "host_discovery_script")  # an elastic job has any of them
_LIKE_AN_ADDRESS = re.compile(r"(.*:)?\d+")
_EXAMPLES = f"{EXAMPLE}, or on two hosts: hvdrun -np 8 -H hostA:4,hostB:4 python train.py"


class OptionParser(argparse.ArgumentParser):
    """Reports mistakes as LaunchError, with an example and the option that was probably meant."""

    example = EXAMPLE

    def error(self, message: str) -> NoReturn:
        _, is_unknown, strange = message.partition("unrecognized arguments: ")
        if is_unknown:
            message = f"there is no option {strange}{self._similar(strange.split()[0])}"
        raise LaunchError(f"{message}\nUsage: {self.usage}; {self.example}")

    def _similar(self, flag: str) -> str:
        name = flag.partition("=")[0]
        alike = difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.7)
        return f": did you mean {alike[0]}?" if alike else ""


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """Returns hvdrun's own options, and the options that are settings of the core as environment variables.

    Options of a --config-file come first, so that the command line overrides them. Raises LaunchError.
    """
    parser, arguments = hvdrun_parser(), _with_address(arguments)
    options, unknown = parser.parse_known_args(arguments)
    needs_settings = options.help or options.config_file is not None or options.autotune_load is not None
    if not unknown and not needs_settings:
        return _checked(options), {}
    from sirtaki.runner.cli.knobs import add_knobs, knob_environment, loaded_environment

    knobs = add_knobs(parser)
    if options.help:
        parser.print_help()
        sys.exit(0)
    options = parser.parse_args(arguments)
    if options.config_file is not None:
        options = parser.parse_args(_with_address([*config_arguments(options.config_file), *arguments]))
    settings = knob_environment(options, knobs)
    _check_autotune(options, settings)
    if options.autotune_load is not None:
        settings = {**loaded_environment(options.autotune_load, knobs), **settings}
    return _checked(options), settings


def hvdrun_parser() -> OptionParser:
    """Returns the parser of all options but the core's settings, which `add_knobs` adds."""
    parser = OptionParser(
        prog="hvdrun",
        usage=USAGE,
        description=f"Starts N ranks of a command, on this machine or on several hosts, {_EXAMPLES}",
        add_help=False,
        allow_abbrev=False,
    )
    _add_options(parser)
    _add_options_for_observing(parser)
    add_options_for_hosts(parser)
    _add_debugging(parser)
    _add_autotune_options(parser)
    _add_elastic_options(parser)
    _add_horovod_flags(parser)
    return parser


def _with_address(arguments: Sequence[str]) -> Sequence[str]:
    """Adds the default address to a --dashboard that has none, or argparse would take the command for it."""
    if DASHBOARD not in arguments:
        return arguments
    from sirtaki.runner.cli.knobs import add_knobs

    place = arguments.index(DASHBOARD)
    parser = hvdrun_parser()
    add_knobs(parser)
    before, (following, *_) = arguments[:place], [*arguments[place + 1 :], ""]
    is_of_command = bool(parser.parse_known_args(before)[0].command)
    if is_of_command or _LIKE_AN_ADDRESS.fullmatch(following):
        return arguments
    return [*before, f"{DASHBOARD}={_ANY_PORT}", *arguments[place + 1 :]]


def _checked(options: argparse.Namespace) -> argparse.Namespace:
    if option := _unused_option(options):
        raise LaunchError(f"{option} is for jobs whose ranks may be lost or join: give --min-np as well")
    if (torch_option := _torch_option(options)) and is_elastic(options):
        raise LaunchError(
            f"{torch_option} is for jobs whose ranks stay, because the ranks of a process group cannot "
            "change: leave it out, or the options of elastic jobs (--min-np, --max-np, "
            "--host-discovery-script)"
        )
    if options.servers and (reason := _why_no_servers(options)):
        raise LaunchError(f"--servers cannot be used with {reason}: leave one of them out")
    if reason := _why_no_debugging(options):
        raise LaunchError(f"--debug-rank {reason}")
    if options.auto and (reason := _why_not_auto(options)):
        raise LaunchError(f"--auto cannot be used with {reason}: leave one of them out")
    return options


def is_elastic(options: argparse.Namespace) -> bool:
    """Returns whether the options ask for an elastic job."""
    return any(getattr(options, name) is not None for name in _ELASTIC)


def _unused_option(options: argparse.Namespace) -> str:
    """Returns an option that has an effect in elastic jobs only, if this is none and it is given; else ""."""
    names: dict[str, Any] = vars(options)
    others = (
        "elastic_timeout",
        "reset_limit",
        "blacklist_cooldown_range",
        "elastic_survive",
        "elastic_failure_domain",
        "slots_per_host",
        "spares",
        "spares_run_script",
    )
    given = [f"--{name.replace('_', '-')}" for name in others if names[name] is not None]
    return "" if is_elastic(options) or not given else given[0]


def _check_autotune(options: argparse.Namespace, settings: Mapping[str, str]) -> None:
    """Raises LaunchError for combinations that have no meaning."""
    is_on = settings.get("SIRTAKI_AUTOTUNE") == "1"
    if is_on and is_elastic(options):
        raise LaunchError(
            "--autotune is for jobs whose ranks stay, because step times before and after a change of the "
            "ranks cannot be compared: leave it out, or the options of elastic jobs (--min-np, --max-np, "
            "--host-discovery-script); --autotune-load works with both"
        )
    if settings.get("SIRTAKI_AUTOTUNE_LOG") and not is_on:
        raise LaunchError("--autotune-log is for --autotune: give that as well, or leave it out")


def _torch_option(options: argparse.Namespace) -> str:
    """Returns the option that sets torch's variables; "" if there is none."""
    return "--as-gloo" if options.as_gloo else "--torch-env" if options.torch_env else ""


def _why_no_debugging(options: argparse.Namespace) -> str:
    """Returns what the option --debug-rank lacks; "" if it is complete, or not given."""
    if options.debug_rank is None:
        return "is missing: --debug-port needs the rank, --debug-rank N" if options.debug_port else ""
    if is_elastic(options):
        return "is for jobs whose ranks stay: leave out --min-np, --max-np and --host-discovery-script"
    if options.debug_port is None and not os.isatty(0) and not options.dry_run:
        return "needs a terminal as standard input: or let a debugger connect, --debug-port 5678"
    return ""


def _why_no_servers(options: argparse.Namespace) -> str:
    """Returns an option that excludes --servers, and why; "" if there is none."""
    if is_elastic(options):
        return (
            "the options of elastic jobs (--min-np, --max-np, --host-discovery-script), because a lost "
            "server's part of a table exists nowhere else"
        )
    return "--auto, whose scripts know no tables" if options.auto else ""


def _why_not_auto(options: argparse.Namespace) -> str:
    """Returns an option that excludes --auto, and why; "" if there is none."""
    if is_elastic(options):
        return "the options of elastic jobs (--min-np, --max-np, --host-discovery-script): its ranks stay"
    if options.as_horovod:
        return "--as-horovod, which is for scripts that are distributed already"
    if torch_option := _torch_option(options):
        return f"{torch_option}, with which trainers distribute the training themselves"
    return ""


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this text")
    add("-v", "--version", action="store_true", help="show the version")
    add("-cb", "--check-build", action="store_true", help="show what is installed here and whether it works")
    add("-np", "-n", "--num-proc", dest="size", metavar="N", type=whole_number, help="number of ranks")
    add(
        "--output-filename",
        metavar="DIR",
        type=Path,
        help="also write the output of each rank to DIR/rank.<number>/stdout and stderr",
    )
    add(
        "--oversubscribe",
        action="store_true",
        help="start more than 16 ranks per core, or more than seem to fit into the memory",
    )
    add(
        "--as-horovod",
        action="store_true",
        help="let `import horovod.torch` and the like mean sirtaki, in programs and libraries that import it",
    )
    add(
        "--as-gloo",
        action="store_true",
        help="--torch-env, and let gloo mean sirtaki in torch.distributed, for trainers that name gloo",
    )
    add(
        "--auto",
        action="store_true",
        help="train with an unchanged script of one process: each rank computes its part of every batch",
    )
    add(
        "--servers",
        metavar="K",
        type=whole_number,
        default=0,
        help="also start K processes that serve the tables of hvd.ParameterServer instead of the ranks; they "
        "are on the hosts of ranks in turn, and need no slots",
    )
    add(
        "--start-timeout",
        metavar="SECONDS",
        type=_seconds,
        default=120.0,
        help="how long a rank waits in hvd.init() for the others (120)",
    )
    add(
        "--torch-env",
        action="store_true",
        help="set torch's variables (RANK, MASTER_ADDR, …), so that trainers such as Lightning use all ranks",
    )
    add("--config-file", metavar="FILE", type=Path, help="also read options from this YAML file")
    add("--dry-run", action="store_true", help="show what would run where, and start nothing")
    add("--verbose", action="store_true", help="show what hvdrun does")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _add_options_for_observing(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--timeline-filename",
        metavar="FILE",
        type=Path,
        help="record every operation of every rank in FILE, for https://ui.perfetto.dev",
    )
    add(
        "--timeline-mark-cycles",
        action="store_true",
        help="also mark in the timeline when ranks have agreed on what to do next",
    )
    add(
        "--no-timeline-mark-cycles",
        dest="timeline_mark_cycles",
        action="store_false",
        help=argparse.SUPPRESS,
    )
    add(
        "--metrics-port",
        metavar="[HOST:]PORT",
        type=_address,
        help="serve the counters of its ranks on each host, for Prometheus (on the loopback address)",
    )
    add(
        DASHBOARD,
        metavar="[HOST:]PORT",
        nargs="?",
        const=_ANY_PORT,
        type=_address,
        help="serve a page with this host's ranks, for a browser (on the loopback address, at a free port)",
    )


def _add_debugging(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("a debugger on one rank").add_argument
    add(
        "--debug-rank",
        metavar="N",
        type=_rank,
        help="give rank N the terminal, so that breakpoint() works, and suspend the deadlines of all ranks",
    )
    add(
        "--debug-port",
        metavar="PORT",
        type=_port,
        help="with --debug-rank: rank N waits in hvd.init() for a debugger instead, at this loopback port",
    )


def add_options_for_hosts(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name hosts, and say how to reach them."""
    add = parser.add_argument_group("several hosts").add_argument
    add(
        "-H",
        "--hosts",
        metavar="HOST:SLOTS,…",
        help="hosts that run ranks, and how many each runs; without :SLOTS one per GPU of the host, or one",
    )
    add(
        "-hostfile",
        "--hostfile",
        metavar="FILE",
        type=Path,
        help="the same, one host per line: 'name slots=N' or 'name:N'",
    )
    add(
        "--launcher",
        choices=("ssh", "srun"),
        default="ssh",
        help="starts ranks on other hosts: ssh, or srun in a Slurm job (ssh)",
    )
    add("-p", "--ssh-port", metavar="PORT", type=_port, help="port of the ssh servers on the hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", type=Path, help="the key with which ssh logs in")
    add(
        "--network-interfaces",
        "--network-interface",
        metavar="NAME,…",
        action="append",
        default=[],
        help="the only network interfaces that ranks use to reach each other (all)",
    )


def _add_autotune_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that are no settings of the core."""
    parser.add_argument(
        "--autotune-load",
        metavar="FILE",
        type=Path,
        help="start with the settings that a job with --autotune-log FILE has kept; options override them",
    )


def _add_elastic_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of elastic jobs: Horovod's, and --elastic-survive, --spares, --spares-run-script."""
    add = parser.add_argument_group("ranks that may be lost or join (docs/guide/elastic.md)").add_argument
    add(
        "--min-np",
        "--min-num-proc",
        metavar="N",
        type=whole_number,
        help="ranks may be lost: the job goes on while there are N; training runs in @hvd.elastic.run",
    )
    add("--max-np", "--max-num-proc", metavar="N", type=whole_number, help="ranks may join, up to N (-np)")
    add(
        "--host-discovery-script",
        metavar="PATH",
        type=Path,
        help="a program that prints the available hosts, a line 'host:slots' each; it runs every second",
    )
    add(
        "--slots-per-host",
        "--slots",
        metavar="N",
        type=whole_number,
        help="slots of hosts that the script prints without a number (1)",
    )
    elastic = "with --min-np"
    add(
        "--elastic-timeout",
        metavar="SECONDS",
        type=_seconds,
        help=f"{elastic}: how long the job waits while there are too few ranks (600)",
    )
    add(
        "--reset-limit", metavar="N", type=whole_number, help=f"{elastic}: losses that the job survives (any)"
    )
    add(
        "--blacklist-cooldown-range",
        metavar=("MIN", "MAX"),
        nargs=2,
        type=_seconds,
        help=f"{elastic}: pause in seconds before a slot that has lost ranks is used again (1 60)",
    )
    add(
        "--elastic-failure-domain",
        choices=("rank", "host"),
        help=f"{elastic}: a lost rank costs only itself, or, as with Horovod, all ranks of its host (rank)",
    )
    add(
        "--elastic-survive",
        choices=("lost", "exit"),
        help=f"{elastic}: survive lost ranks only, or, as Horovod, any that ends with an error (lost)",
    )
    _add_spares(add, elastic)


def _add_spares(add: Callable[..., argparse.Action], elastic: str) -> None:
    add(
        "--spares",
        metavar="N",
        type=whole_number,
        help=f"{elastic}: processes with modules loaded, spread over the hosts, that replace lost ranks (0)",
    )
    add(
        "--spares-run-script",
        action="store_true",
        default=None,
        help="with --spares: they also run the program, up to hvd.init()",
    )


def _integer(what: str, least: int, most: float = math.inf) -> Callable[[str], int]:
    """Returns a parser of numbers within bounds, which raises ArgumentTypeError for other texts."""

    def parse_integer(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"it takes {what}, not '{text}'")
        return int(text)

    return parse_integer


whole_number = _integer("a whole number of at least 1", 1)
_rank = _integer("the number of a rank, from 0 on", 0)
_port = _integer("a number from 1 to 65535", 1, 65535)


def _address(text: str) -> str:
    from sirtaki.runner.observe.endpoints import parse_address

    try:
        parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def known_names(text: str, known: Collection[str], kind: str, option: str) -> list[str]:
    """Returns the names in a comma-separated text, each once. Raises LaunchError for an unknown name."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise LaunchError(f"there is no {kind} {name!r}: {option} takes {', '.join(known)}")
    return list(dict.fromkeys(names))


def number_above(least: float, what: str) -> Callable[[str], float]:
    """Returns a parser of finite numbers above `least`, which raises ArgumentTypeError for other texts."""

    def parse_number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least < value < math.inf:
            raise argparse.ArgumentTypeError(f"it takes {what} above {least:g}, not '{text}'")
        return value

    return parse_number


_seconds = number_above(0, "a number of seconds")


# ---- Horovod's flags: options of horovodrun that hvdrun lacks, and why; others change nothing ----------
# `--cache-capacity`, `--hosts` and others are identical and need no entry; `knobs` translates the flags that
# are settings of the core.


_OWN_STEPS = "autotune chooses the number of its steps, and models no noise: leave it out"

# Options with an alternative, by the reason. With or without a value, the answer is the reason.
_REFUSED_FOR: dict[str, Sequence[str]] = {
    "hvdrun keeps nothing between jobs: leave it out": ("--disable-cache",),
    "there is no MPI here: leave it out": ("--mpi", "--jsrun", "--mpi-args", "--mpi-threads-disable"),
    "it is for MPI and NCCL; to keep NCCL off InfiniBand, set NCCL_IB_DISABLE=1": ("--tcp",),
    "there are no cycles; the closest equivalent is --report-window SECONDS": ("--cycle-time-ms",),
    "all-gathers need no such option: leave it out": ("--hierarchical-allgather",),
    "use --cpu-algorithm hierarchical": ("--torus-allreduce",),
    _OWN_STEPS: (
        *("--autotune-warmup-samples", "--autotune-steps-per-sample"),
        *("--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise"),
    ),
    "hvdrun binds no rank to cores: start the command through taskset or numactl": (
        "--binding-args",
        "--thread-affinity",
    ),
    "all operations on a GPU share one stream": ("--num-nccl-streams",),
    "use --start-timeout for the start, --progress-deadline afterwards": ("--gloo-timeout-seconds",),
    "there are no log levels: --verbose shows more, --log-descriptor -1 silences the ranks' core": (
        "--log-level",
        "--log-with-timestamp",
        "--log-hide-timestamp",
    ),
    "pipe hvdrun's output through `ts` instead": ("-prefix-timestamp", "--prefix-output-with-timestamp"),
}
REFUSED = {flag: reason for reason, flags in _REFUSED_FOR.items() for flag in flags}
# Options that request the behaviour that is always on.
_ALREADY_SO = (
    *("--gloo", "--no-autotune", "--stall-check", "--no-torus-allreduce", "--no-hierarchical-allgather"),
    *("--no-mpi-threads-disable", "--log-without-timestamp", "--no-log-hide-timestamp"),
)


class _Refuse(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        raise LaunchError(f"hvdrun does not take {option_string}: {REFUSED[option_string or '']}")


def _add_horovod_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that need no knowledge of the core's settings."""
    for flag in REFUSED:
        parser.add_argument(flag, nargs="?", action=_Refuse, dest=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for flag in _ALREADY_SO:
        nothing = argparse.SUPPRESS
        parser.add_argument(flag, action="store_true", dest=nothing, default=nothing, help=nothing)


# ---- --config-file: a YAML file with Horovod's keys, or hvdrun's, as command-line options --------------
# Both forms become the same options, so the meaning of a flag, and why it is rejected, is stated in one
# place.


_SECTIONS = {
    "params": {
        "fusion_threshold_mb": "--fusion-threshold-mb",
        "cycle_time_ms": "--cycle-time-ms",
        "cache_capacity": "--cache-capacity",
        "hierarchical_allreduce": "--[no-]hierarchical-allreduce",
        "hierarchical_allgather": "--[no-]hierarchical-allgather",
        "torus_allreduce": "--[no-]torus-allreduce",
    },
    "autotune": {
        "enabled": "--[no-]autotune",
        "log_file": "--autotune-log-file",
        "warmup_samples": "--autotune-warmup-samples",
        "steps_per_sample": "--autotune-steps-per-sample",
        "bayes_opt_max_samples": "--autotune-bayes-opt-max-samples",
        "gaussian_process_noise": "--autotune-gaussian-process-noise",
    },
    "timeline": {"filename": "--timeline-filename", "mark_cycles": "--[no-]timeline-mark-cycles"},
    "stall_check": {
        "enabled": "--[no-]stall-check",
        "warning_time_seconds": "--stall-check-warning-time-seconds",
        "shutdown_time_seconds": "--stall-check-shutdown-time-seconds",
    },
    "library_options": {
        "mpi_threads_disable": "--[no-]mpi-threads-disable",
        "num_nccl_streams": "--num-nccl-streams",
        "thread_affinity": "--thread-affinity",
        "gloo_timeout_seconds": "--gloo-timeout-seconds",
    },
    "logging": {"level": "--log-level", "with_timestamp": "--log-[with|without]-timestamp"},
}
_CONTROLLERS = {"gloo": "--gloo", "mpi": "--mpi", "jsrun": "--jsrun"}
_CHOICES = {"[no-]": ("", "no-"), "[with|without]": ("with", "without")}  # the prefixes for true and false


def config_arguments(path: Path) -> list[str]:
    """Returns the options that the file stands for. Raises LaunchError for what it does not recognise."""
    return list(_arguments(_read(path), str(path)))


def _read(path: Path) -> Mapping[Any, Any]:
    try:
        import yaml
    except ImportError:
        raise LaunchError("--config-file needs PyYAML: install it with `pip install pyyaml`") from None
    with explained(f"cannot read {path}"):
        text = path.read_bytes()
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise LaunchError(f"{path} is not valid YAML: {error}") from None
    if content is not None and not isinstance(content, Mapping):
        raise LaunchError(f"{path} has to consist of keys and values, such as 'params:'")
    return content or {}


def _arguments(content: Mapping[Any, Any], file: str) -> Iterator[str]:
    for section, value in content.items():
        if section == "controller":
            if value not in _CONTROLLERS:
                raise LaunchError(f"{file}: controller is one of {', '.join(_CONTROLLERS)}, not {value!r}")
            yield _CONTROLLERS[value]
        elif section in _SECTIONS:
            yield from _of_section(section, value, file)
        else:
            yield from _of_option(section, value, file)


def _of_section(section: str, content: Any, file: str) -> Iterator[str]:
    if not isinstance(content, Mapping):
        raise LaunchError(f"{file}: {section} has to have keys and values below it")
    for key, value in content.items():
        if key not in _SECTIONS[section]:
            known = ", ".join(_SECTIONS[section])
            raise LaunchError(f"{file}: there is no {section}.{key}: {section} has {known}")
        if value is not None:
            yield _option(_SECTIONS[section][key], f"{section}.{key}", value, file)


def _of_option(key: Any, value: Any, file: str) -> Iterator[str]:
    """Yields an option of hvdrun itself that is at the top level of the file: "num_proc: 4"."""
    if not isinstance(key, str) or not key.replace("_", "").replace("-", "").isalnum():
        raise LaunchError(f"{file}: {key!r} is not a setting")
    flag = f"--{key.replace('_', '-')}"
    if value is True:
        yield flag
    elif value is not False and value is not None:
        yield f"{flag}={_plain(value, key, file)}"


def _option(flag: str, key: str, value: Any, file: str) -> str:
    for choice, (yes, no) in _CHOICES.items():
        if choice in flag:
            if not isinstance(value, bool):
                raise LaunchError(f"{file}: {key} is true or false, not {value!r}")
            return flag.replace(choice, yes if value else no)
    return f"{flag}={_plain(value, key, file)}"


def _plain(value: Any, key: str, file: str) -> str:
    if isinstance(value, list) and all(isinstance(element, str | int) for element in value):
        return ",".join(map(str, value))
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise LaunchError(f"{file}: {key} has to be a number or a text, not {value!r}")
    return str(value)
